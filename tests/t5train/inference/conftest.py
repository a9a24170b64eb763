"""Folders of T5s: exports, and folders as other projects publish them."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from t5train.records.stage_records import MANIFEST
from t5train.release.export import export
from tests.support.synthetic_models import make_trained

MakeModel = Callable[..., Path]
_ENDS_AT_TIMES = -2.2
_EOS_ID = 1
SETTINGS = {"corpus": {"split": [700, 200, 100], "split_seed": 3}, "shards": {"shard_tokens": 4096}}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """``make_model(version, num_files)``: an export whose settings differ from the default ones."""

    def make(version: str = "v1.1", num_files: int = 1) -> Path:
        trained = make_trained(tmp_path, version, num_files)
        witness = trained.witness / "witness.json"
        document: dict[str, Any] = json.loads(witness.read_text())
        settings = document["trained"]["settings"]
        for part, values in SETTINGS.items():
            settings[part] |= values
        settings["optimizer"]["seed"] = 5
        settings["objective"] = {"noise_density": 0.2, "mean_span_tokens": 2.0, "input_tokens": 32}
        witness.write_text(json.dumps(document))
        return export(*trained, tmp_path / "model").path

    return make


@pytest.fixture
def make_published(make_model: MakeModel, tmp_path: Path) -> MakeModel:
    """``make_published(version, vocabulary)``: as other projects publish a T5, in several files, with one vocabulary.

    ``vocabulary`` is spiece.model or tokenizer.json.
    """

    def make(version: str = "v1.1", vocabulary: str = "spiece.model") -> Path:
        ours, theirs = make_model(version), tmp_path / "theirs"
        model = AutoModelForSeq2SeqLM.from_pretrained(ours)
        model.save_pretrained(theirs, max_shard_size="20kB")
        config = json.loads((ours / "config.json").read_text())
        (theirs / "config.json").write_text(json.dumps(config | {"n_positions": 512}))
        shutil.copy(ours / vocabulary, theirs)
        return theirs

    return make


@pytest.fixture(autouse=True)
def restore_generator() -> Any:
    with torch.random.fork_rng():
        yield


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
