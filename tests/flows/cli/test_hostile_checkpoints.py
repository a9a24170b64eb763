"""``consolidate`` on a checkpoint from elsewhere: nothing that its pickles ask for is run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from t5train.model.parameters import ParameterSlot

MODEL = "mp_rank_00_model_states.pt"


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
    record_only_rank: Callable[..., None],
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
