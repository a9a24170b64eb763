"""The step log."""

from pathlib import Path

import pytest

from t5train.records.metrics import Metrics, loss_lines, read


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", resume_step=0) as metrics:
        metrics.write(1, {"loss": 2.5, "gradient_norm": None})
        assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "gradient_norm": None}]


def test_on_resume_later_lines_are_dropped_and_earlier_values_are_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, tmp_path / "tensorboard", resume_step=0) as metrics:
        assert not metrics.recorded
        for step, values in enumerate(({"unigram": 6.5}, {"loss": 1.0}, {"unigram": 6.25}, {"validation_loss": 5.0})):
            metrics.write(step, values)
    with Metrics(path, tmp_path / "tensorboard", resume_step=2) as metrics:
        assert metrics.recorded == {"step": 2, "unigram": 6.25, "loss": 1.0}
        metrics.write(3, {"loss": 40.0})
    assert [line.get("loss") for line in read(path)] == [None, 1.0, None, 40.0]


def test_a_line_cut_off_by_a_kill_is_ignored_and_removed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert read(path) == [{"step": 1, "loss": 1.0}]
    with Metrics(path, tmp_path / "tensorboard", resume_step=1):
        assert path.read_text() == '{"step": 1, "loss": 1.0}\n'


@pytest.mark.parametrize("damage", [b"\0" * 40, b'{"step": 2, "loss"\xff: 1.0}', b"[]", b'{"loss": 1.0}'])
def test_a_damaged_line_is_skipped_and_the_log_continues(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + damage + b'\n{"step": 3, "loss": 3.0}\n')
    with Metrics(path, tmp_path / "tensorboard", resume_step=3) as metrics:
        metrics.write(4, {"loss": 4.0})
    assert [line["step"] for line in read(path)] == [1, 3, 4]
    assert damage not in path.read_bytes()


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", resume_step=0) as metrics:
        metrics.write(1, {"loss": 2.5})
        metrics.write(2, {"loss": 1.5})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]


def test_the_losses_at_the_end_say_plainly_if_the_model_has_learned_nothing() -> None:
    losses = {"validation_content_loss": 5.5, "unigram_content_loss": 6.0, "shuffled_content_loss": 5.75}
    lines = loss_lines(losses | {"test_content_loss": None})
    assert [line.partition(" ")[0] for line in lines] == ["5.5000", "6.0000", "5.7500"]
    assert loss_lines(losses | {"test_content_loss": 5.625})[-1] == "5.6250 nats/token: test split, masked tokens"
    for poor in (6.0, 6.5):
        last = loss_lines(losses | {"validation_content_loss": poor})[-1]
        assert last.startswith("The model predicts no better than the unigram baseline.")
        assert loss_lines(losses | {"validation_content_loss": poor}, is_trial=True)[-1].startswith(
            "The trial has succeeded."
        )
    assert len(loss_lines(losses, is_trial=True)) == 3, "a trial that has learned something needs no explanation"
    assert len(loss_lines({"validation_content_loss": 5.5})) == 1, "earlier versions recorded no baseline"


def test_losses_of_pairs_are_shown_with_the_share_that_is_predicted_right() -> None:
    losses = {"validation_loss": 0.5, "unigram_loss": 3.0, "shuffled_loss": 2.0, "test_loss": 0.6}
    shares = {"validation_token_accuracy": 0.9, "validation_exact_match": 0.75, "test_exact_match": 0.7}
    lines = loss_lines(losses | shares)
    assert [line.partition(" ")[0] for line in lines] == [
        *("0.5000", "3.0000", "2.0000", "0.6000"),
        "90.00%:",
        "75.00%:",
        "70.00%:",
    ]
    assert not any("masked" in line for line in lines)
    assert lines[-1] == "70.00%: test split, exact match, pairs of which every target token is predicted right"
    of_tasks = {"test_exact_match_of_task_0": 0.9, "test_exact_match_of_task_1": 0.5}
    assert loss_lines(losses | shares | of_tasks, ["sort", "sum"])[-1] == (
        "exact match of each task, test split: sort 90.00%, sum 50.00%"
    )
    assert "no better than the unigram baseline" in loss_lines(losses | {"validation_loss": 3.0})[-1]
