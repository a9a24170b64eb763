"""Values that users pass as ``client_state``, which DeepSpeed stores in the model states beside its own."""

import argparse
import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from tests.support.checkpoints.deepspeed_files import Written


def save_client_state(written: Written, **state: object) -> None:
    path = written.tag / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path, weights_only=False) | state, path)  # a file that this test wrote


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3), np.random.RandomState(0).get_state(), np.float64(0.5), np.array(["text"]), Path("/data"),
        datetime.datetime(2026, 11, 21), datetime.timedelta(1), argparse.Namespace(dtype=torch.bfloat16, inner=[1]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_common_values_in_client_state_are_ignored(
    write_checkpoint: Callable[..., Written], tmp_path: Path, value: object
) -> None:
    written = write_checkpoint()
    save_client_state(written, mine=value)
    consolidate(written.folder, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in written.expected.items())


@pytest.mark.parametrize("differ", [False, True])
def test_numpy_learning_rates_are_still_compared_between_ranks(
    write_checkpoint: Callable[..., Written], tmp_path: Path, differ: bool
) -> None:
    written = write_checkpoint()
    for rank, path in enumerate(sorted(written.tag.glob("*optim_states.pt"))):
        content = torch.load(path, weights_only=False)  # a file that this test wrote
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = np.float64(
            0.5 + rank * differ
        )
        torch.save(content, path)
    if not differ:
        consolidate(written.folder, tmp_path / "out")
    else:
        with pytest.raises(IncompleteCheckpoint, match="differ in learning rates"):
            consolidate(written.folder, tmp_path / "out")


@pytest.mark.parametrize("key", ["global_steps", "dp_world_size"])
def test_a_counter_overwritten_by_client_state_is_refused_and_named(
    write_checkpoint: Callable[..., Written], tmp_path: Path, key: str
) -> None:
    written = write_checkpoint()
    save_client_state(written, **{key: np.int64(2)})
    with pytest.raises(UnknownLayout, match=f"{key} is .*, not an integer. Probably the client_state .* key {key}"):
        consolidate(written.folder, tmp_path / "out")
