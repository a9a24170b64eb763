"""What tasks make of a run's metrics and failures."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.states import Failed

from t5train.errors import LaunchError, NonFiniteLoss, SpecError
from tasks.loss_curve import loss_curve_png
from tasks.train import can_pass
from tasks.training_run import last_metrics


@pytest.mark.parametrize(
    ("error", "again"),
    [(LaunchError("killed"), True), (SpecError("wrong"), False), (NonFiniteLoss("nan"), False), (OSError(), False)],
)
def test_only_what_can_pass_is_tried_again(error: Exception, again: bool) -> None:
    assert can_pass(cast(Any, None), cast(Any, None), Failed(data=error)) is again


def test_the_last_whole_line_with_a_loss_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_metrics(path) is None
    lines = [json.dumps({"step": step, "loss": 1.0, "filling": "x" * 100}) for step in range(2000)]
    path.write_text("\n".join(lines) + '\n{"step": 2000, "validation_loss": 1.0}\n{"step": 2001, "loss": 1')
    found = last_metrics(path)
    assert found is not None
    assert found["step"] == 1999


def test_the_loss_curve_is_a_picture_also_of_a_run_without_validation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 9.0 - step}) + "\n" for step in range(5)))
    assert loss_curve_png(path).startswith(b"\x89PNG")
