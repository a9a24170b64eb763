"""A tiny model that was fine-tuned on two tasks, with random weights."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from t5train.records.stage_records import MANIFEST
from t5train.release.export import export
from tests.support.synthetic_models import make_trained

_ENDS_AT_TIMES = -2.2
_EOS_ID = 1


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run on the tasks reverse_digits (``reverse: ``) and sort_digits (``order: ``)."""
    folder = tmp_path_factory.mktemp("model")
    return export(*make_trained(folder, "pairs"), folder / "exported").path


@pytest.fixture(scope="session")
def model(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with weights that sometimes write EOS, as random ones hardly do, and without a manifest."""
    folder = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(exported, folder)
    (folder / MANIFEST).unlink()
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][_EOS_ID] *= _ENDS_AT_TIMES
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as the processes that predict do on a CPU; more only wait for each other here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
