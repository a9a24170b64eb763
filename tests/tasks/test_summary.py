"""The summary's line on how long saving checkpoints paused training."""

from t5train.metrics import Values
from tasks.summary import saving_line


def test_the_share_is_of_the_time_for_steps_and_saving_together() -> None:
    steps: list[Values] = [{"step": step, "seconds": 0.5} for step in range(1, 197)]
    saves: list[Values] = [{"step": 100, "save_seconds": 0.75}, {"step": 196, "save_seconds": 1.25}]
    assert saving_line(steps + saves) == "2 checkpoints, which paused training for 2.0 s: 2.00% of its time"


def test_validation_lines_count_as_neither_training_nor_saving_time() -> None:
    assert saving_line([{"step": 1, "validation_loss": 2.0, "seconds": None}]).endswith("0.0 s: 0.00% of its time")
