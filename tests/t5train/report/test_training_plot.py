"""The plot of training has a bounded size, and shows the baseline from the beginning."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from t5train.records.metrics import MetricsSeries
from t5train.report import training_plot

MOST_BYTES = 200_000
SMALL = {"learning_rate": 0.01, "tokens_per_second": 1e6, "data_wait_seconds": 0.001}


def metrics_of(path: Path, lines: list[dict[str, Any]]) -> MetricsSeries:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = MetricsSeries(path)
    metrics.refresh()
    return metrics


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the panels that were drawn."""
    drawn: list[str] = []
    original = Axes.set_title

    def set_title(axes: Axes, label: str, **options: Any) -> Any:
        drawn.append(label)
        return original(axes, label, **options)

    monkeypatch.setattr(Axes, "set_title", set_title)
    return drawn


def noisy(count: int) -> list[dict[str, Any]]:
    """Metrics of a model with experts in which every value is noise, which compresses worst."""
    noise = random.Random(0).random
    names = ("loss", "learning_rate", "tokens_per_second", "mfu", "skipped_steps", "dropped_tokens")
    experts = [f"tokens/encoder.mlp/expert_{number}" for number in range(8)]
    lines = [{"step": step, **{name: noise() for name in names}} for step in range(1, count + 1)]
    for step in range(20, count + 1, 20):
        losses = {"validation_loss": noise(), "validation_content_loss": noise()}
        lines.append({"step": step, "starving_experts": 0, **losses, **{name: noise() for name in experts}})
    return lines


def test_the_picture_of_a_long_noisy_run_is_small(tmp_path: Path, titles: list[str]) -> None:
    png = training_plot.training_plot(metrics_of(tmp_path / "metrics.jsonl", noisy(20_000)), 40_000)
    assert png.startswith(b"\x89PNG")
    assert 10_000 < len(png) < MOST_BYTES
    assert len(titles) == 7


def test_values_that_a_run_lacks_have_no_panel(tmp_path: Path, titles: list[str]) -> None:
    lines = [{"step": step, "loss": 9.0 - step, **SMALL} for step in range(5)]
    assert training_plot.training_plot(metrics_of(tmp_path / "metrics.jsonl", lines), 10).startswith(b"\x89PNG")
    of_steps = ["Learning rate", "Tokens per second", "Wait for data (seconds of a step)"]
    assert titles == ["Loss (nats per token)", *of_steps]


def test_the_baseline_is_drawn_after_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    original = Axes.axhline

    def axhline(axes: Axes, y: float, **options: Any) -> Any:
        drawn.append(y)
        return original(axes, y, **options)

    monkeypatch.setattr(Axes, "axhline", axhline)
    lines = [{"step": 0, "unigram_content_loss": 6.5}, {"step": 1, "loss": 9.0}]
    training_plot.training_plot(metrics_of(tmp_path / "metrics.jsonl", lines), 10)
    assert drawn == [6.5]


def test_of_a_run_on_pairs_the_shares_predicted_right_and_the_baseline_of_targets_are_drawn(
    tmp_path: Path, titles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    original = Axes.axhline

    def axhline(axes: Axes, y: float, **options: Any) -> Any:
        labels.append(options["label"])
        return original(axes, y, **options)

    monkeypatch.setattr(Axes, "axhline", axhline)
    validated = {"step": 1, "validation_loss": 2.0, "validation_exact_match": 0.5, "validation_token_accuracy": 0.75}
    lines = [{"step": 0, "unigram_loss": 6.5}, {"step": 1, "loss": 9.0}, validated]
    training_plot.training_plot(metrics_of(tmp_path / "metrics.jsonl", lines), 10)
    assert "Share of held-out pairs that is predicted right" in titles
    assert labels == ["unigram baseline, all target tokens"]
