"""Progress of stages as Prefect artifacts, in the title of the run's page, and in the log; what training adds."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tasks import run_page, stage_progress
from tasks.stage_progress import StageProgress, TrainingView
from tasks.stages import TRAIN


@pytest.fixture
def immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_progress, "SECONDS_UNTIL_SHOWN", 0)


@pytest.mark.usefixtures("immediately")
def test_a_stage_continues_if_the_server_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_arguments: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(run_page, "create_progress_artifact", gone)
    with caplog.at_level(logging.WARNING):
        StageProgress(TRAIN)("steps", 3, 10)
    assert "could not show the artifact progress-train: connection refused" in caplog.text


@pytest.mark.usefixtures("immediately")
def test_the_title_names_the_stage_at_once_and_then_step_loss_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str | None] = []
    clock = iter([0.0, 1.0, 3.0, 5.0, 12.0, 30.0])
    monkeypatch.setattr(stage_progress, "show_in_title", titles.append)
    monkeypatch.setattr(stage_progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(run_page, "create_progress_artifact", lambda *_arguments: None)
    progress = StageProgress(TRAIN)
    assert titles == ["Train"]
    for step, loss in ((0, 9.0), (1, 8.0), (2, 7.0), (4, 6.0), (10, 5.0)):
        progress(f"steps, loss {loss:.3f}, 1,000 tokens/s", step, 10)
    assert titles[1:] == [
        "Train: 0 of 10 steps, loss 9.000",
        "Train: 4 of 10 steps, loss 6.000, 16 s left",
        "Train: 10 of 10 steps, loss 5.000",
    ]


@pytest.mark.usefixtures("immediately")
def test_title_and_log_name_one_loss_and_the_artifact_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    titles, descriptions = list[str | None](), list[str]()
    monkeypatch.setattr(stage_progress, "show_in_title", titles.append)
    monkeypatch.setattr(stage_progress, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(run_page.Shown, "show", lambda _self, _percent, text: descriptions.append(text))
    what = (
        "steps, training loss (all target tokens) 2.500 nats/token, 1,000 tokens/s, "
        "validation loss after step 10: 5.000 (all target tokens), 5.500 (masked tokens; unigram baseline 6.125)"
    )
    with caplog.at_level(logging.INFO):
        StageProgress(TRAIN)(what, 1_234, 65_536)
    assert titles[-1] == "Train: 1,234 of 65,536 steps, training loss 2.500 nats/token"
    line = "Train: 1,234 of 65,536 steps, training loss (all target tokens) 2.500 nats/token, 1,000 tokens/s"
    assert caplog.messages == [line]
    assert descriptions == [f"1,234 of 65,536 {what}"]


def test_watchers_get_every_report_with_the_title_of_the_stage() -> None:
    seen: list[Any] = []
    StageProgress(TRAIN, lambda *report: seen.append(report))("steps", 3, 10)
    assert seen == [("Train: steps", 3, 10)]


@pytest.mark.usefixtures("immediately")
def test_an_artifact_is_updated_at_most_once_per_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, updates = [0.0], list[tuple[float, float]]()
    monkeypatch.setattr(stage_progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_page.Shown, "show", lambda _self, percent, _text: updates.append((clock[0], percent)))
    progress = StageProgress(TRAIN)
    for step in range(10):
        clock[0] = step / 4
        progress("steps", step, 100)
    progress("steps", 100, 100)
    assert updates == [(0.0, 0.0), (1.0, 4.0), (2.0, 8.0), (2.25, 100.0)]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(tmp_path), "name": "mine"})


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Keys and data of the artifacts, each time they are shown."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(run_page.Shown, "show", lambda self, data, _text: found.append((self._key, data)))
    return found


def write_steps(spec: RunSpec, count: int) -> None:
    path = spec.run_folder / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0 + 1 / step}) + "\n" for step in range(1, count + 1)))


def test_the_plot_is_shown_early_and_again_at_the_end(
    spec: RunSpec, shown: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_progress, "SECONDS_UNTIL_METRICS", 0.0)
    with TrainingView(spec) as view:
        view("steps, ranks are starting", 0, 100)
        write_steps(spec, 5)
        deadline = time.monotonic() + 60
        while not shown:
            assert time.monotonic() < deadline
            view("steps", 5, 100)
        for _ in range(50):
            view("steps", 5, 100)
        write_steps(spec, 90)
    pictures = [data for key, data in shown if key == "training"]
    assert len(pictures) == 2
    assert pictures[0] != pictures[1]
    assert (spec.run_folder / "report/training.png").read_bytes() == pictures[1]


def test_hosts_are_shown_when_their_bytes_change(spec: RunSpec, shown: list[tuple[str, Any]]) -> None:
    with TrainingView(spec) as view:
        view.staged.add("a", needed=3_000)
        view("bytes staged on hosts", 0, 3_000)
        view("bytes staged on hosts", 0, 3_000)
        view.staged.add("a", copied=1_000, already_there=2_000)
    expected = {"host": "a", "bytes needed": "3,000", "bytes copied": "1,000", "already there": "2,000"}
    assert [data for key, data in shown if key == "staging"] == [
        [{**expected, "bytes copied": "0", "already there": "0"}],
        [expected],
    ]
    assert (spec.run_folder / "report/staging.md").read_text().endswith("| a | 3,000 | 1,000 | 2,000 |\n")
