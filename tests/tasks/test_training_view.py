"""While ranks train, the plot grows and the table of hosts is kept up to date, at a limited rate."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tasks import artifacts, training_view
from tasks.training_view import TrainingView


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(tmp_path), "name": "mine"})


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Keys and data of the artifacts, each time they are shown."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(artifacts.Shown, "show", lambda self, data, _text: found.append((self._key, data)))
    return found


def write_steps(spec: RunSpec, count: int) -> None:
    path = spec.run_folder / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0 + 1 / step}) + "\n" for step in range(1, count + 1)))


def test_the_plot_is_shown_early_and_again_at_the_end(
    spec: RunSpec, shown: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_view, "SECONDS_UNTIL_METRICS", 0.0)
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
