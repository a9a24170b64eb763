"""``consolidate`` as a user calls it: nothing that the pickles of a checkpoint from elsewhere ask for is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint import sidecar
from t5train.model.parameters import ParameterSlot
from t5train.records.best_so_far import BestSoFar

MODEL = "mp_rank_00_model_states.pt"
Record = Callable[..., None]


def write_tag(tag: Path, record: Record) -> dict[str, dict[str, torch.Tensor]]:
    """Write a checkpoint of one fp32 rank without separate masters; return the expected tensors, by file."""
    tag.mkdir(parents=True)
    held = {
        stem: {"b.weight": torch.randn(3, 2), "a.bias": torch.randn(4)} for stem in ("model", "exp_avg", "exp_avg_sq")
    }
    states = {
        number: {"step": torch.tensor(3.0)} | {key: held[key][name] for key in ("exp_avg", "exp_avg_sq")}
        for number, name in enumerate(held["model"])
    }
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"module": held["model"], "optimizer": optimizer, "global_steps": 3, "dp_world_size": 1}, tag / MODEL)
    record(tag, [MODEL], [ParameterSlot.of("b.weight", (3, 2), 0), ParameterSlot.of("a.bias", (4,), 6)])
    return held


def test_moments_are_written_only_on_request(
    t5_pretrain: Callable[..., int], record_only_rank: Record, tmp_path: Path
) -> None:
    held = write_tag(tmp_path / "checkpoints/step-00000003", record_only_rank)
    assert t5_pretrain("consolidate", "checkpoints", "plain") == 0
    assert t5_pretrain("consolidate", "checkpoints", "out", "--moments") == 0
    assert sorted(path.stem for path in (tmp_path / "plain").glob("*.safetensors")) == ["model"]
    for stem, tensors in held.items():
        found = load_file(tmp_path / "out" / f"{stem}.safetensors")
        assert sorted(found) == sorted(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert t5_pretrain("verify", "out") == 0


def test_the_best_checkpoint_is_taken_unless_a_tag_is_named_as_the_best_is_the_result_of_the_run(
    t5_pretrain: Callable[..., int], record_only_rank: Record, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_tag(tmp_path / "checkpoints/step-00000003", record_only_rank)
    newest = tmp_path / "checkpoints/step-00000004"
    newest.mkdir()
    record_only_rank(newest, [], [])
    best = BestSoFar(step=3, value=0.5, validations_since=1)
    sidecar.write(newest, sidecar.read(newest, 0).model_copy(update={"step": 4, "best": best}))
    assert t5_pretrain("consolidate", "checkpoints", "out") == 0
    assert capsys.readouterr().out.endswith("/out, of step 3\n")


class Hostile:
    """Creates a file when it is unpickled by a reader that allows function calls."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


@pytest.mark.parametrize("with_sidecar", [False, True])
@pytest.mark.parametrize("key", ["module", "optimizer", "elsewhere"])
def test_a_pickle_that_would_run_code_is_refused_by_name_and_nothing_is_written(
    t5_pretrain: Callable[..., int],
    record_only_rank: Record,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    with_sidecar: bool,
    key: str,
) -> None:
    tag, marker = tmp_path / "checkpoints/step-00000003", tmp_path / "the-code-ran"
    tag.mkdir(parents=True)
    state: dict[str, Any] = {"module": {"shared.weight": torch.ones(3, 2)}, "optimizer": None, "global_steps": 3}
    torch.save(state | {key: Hostile(marker)}, tag / MODEL)
    if with_sidecar:
        record_only_rank(tag, [MODEL], [ParameterSlot.of("shared.weight", (3, 2), 0)])
    assert t5_pretrain("consolidate", str(tag), "out") == 10
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert output.count("\n") == 1
    assert MODEL in output
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    torch.load(tag / MODEL, weights_only=False)  # the control: a reader that allows function calls does run it
    assert marker.exists(), "the control did not run the code of the pickle"
