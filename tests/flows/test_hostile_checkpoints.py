"""``consolidate`` on a checkpoint that somebody else made: whatever its pickles ask for, nothing of it is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from t5train import sidecar
from t5train.records import digest_files
from t5train.sidecar import DataState, ParallelLayout, ParameterSlot, Sidecar

MODEL = "mp_rank_00_model_states.pt"


class Hostile:
    """Makes a file when it is unpickled by a reader that lets pickles call."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._sign,)


def write_sidecar(tag: Path) -> None:
    """What a run would have written beside that file, digests and all."""
    sidecar.write(
        tag,
        Sidecar(
            run_fingerprint="a" * 64,
            step=3,
            tag=tag.name,
            rank=0,
            world_size=1,
            layout=ParallelLayout(zero_stage=0, precision="fp32", data_parallel_rank=0, data_parallel_size=1),
            files=digest_files(tag, [MODEL]),
            groups=[[ParameterSlot.of("shared.weight", (3, 2), 0)]],
            huggingface_config={"model_type": "t5"},
            data=DataState(samples_consumed=3, shards_fingerprint="b" * 64),
        ),
    )


@pytest.mark.parametrize("with_sidecar", [False, True])
@pytest.mark.parametrize("place", ["module", "optimizer", "elsewhere"])
def test_a_pickle_that_would_run_code_is_refused_by_name_and_nothing_is_written(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    with_sidecar: bool,
    place: str,
) -> None:
    tag, sign = tmp_path / "checkpoints/step-00000003", tmp_path / "the-code-ran"
    tag.mkdir(parents=True)
    state: dict[str, Any] = {"module": {"shared.weight": torch.ones(3, 2)}, "optimizer": None, "global_steps": 3}
    torch.save(state | {place: Hostile(sign)}, tag / MODEL)
    if with_sidecar:
        write_sidecar(tag)
    assert t5_pretrain("consolidate", str(tag), "out") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert MODEL in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    torch.load(tag / MODEL, weights_only=False)  # the control: who lets pickles call does run this one
    assert sign.exists(), "the pickle was not hostile"
