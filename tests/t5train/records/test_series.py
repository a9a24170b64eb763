"""The series of a plot have a bounded size, grow with the file, and follow it when a resume drops lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from t5train.records.metrics import CAPACITY, HIGHEST_EXPERT, LOWEST_EXPERT, MetricsSeries, Series, drop_after


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def points(metrics: MetricsSeries, name: str = "loss") -> list[tuple[int, float]]:
    metrics.refresh()
    return [(bucket.step, bucket.mean) for bucket in metrics.series[name].buckets]


def test_only_lines_that_were_added_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "metrics.jsonl", []
    metrics = MetricsSeries(path)
    metrics.refresh()
    append(path, steps(1, 100))
    metrics.refresh()
    monkeypatch.setattr(MetricsSeries, "_add", lambda _self, values: read.append(values["step"]))
    for part in ('{"step": 101, "loss": 2.0}\n{"step": 102, "lo', 'ss": 2.0}\n'):
        with open(path, "a", encoding="utf-8") as file:
            file.write(part)
        metrics.refresh()
    assert read == [101, 102]


def test_lines_that_a_resume_dropped_and_trained_again_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, [{"step": 0, "unigram_content_loss": 6.0}, *steps(1, 20)])
    metrics = MetricsSeries(path)
    metrics.refresh()
    drop_after(path, 10)
    append(path, steps(11, 30, loss=1.0))  # longer than before
    assert points(metrics) == [(step, 2.0 if step <= 10 else 1.0) for step in range(1, 31)]
    assert (metrics.baseline, metrics.last_step) == (6.0, 30)
    drop_after(path, 5)
    assert [step for step, _ in points(metrics)] == [1, 2, 3, 4, 5]


def test_a_rewritten_file_with_the_same_lines_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, steps(1, 20))
    metrics = MetricsSeries(path)
    metrics.refresh()
    drop_after(path, 20)
    monkeypatch.setattr(MetricsSeries, "_begin", lambda _self: pytest.fail("read again"))
    append(path, steps(21, 22))
    assert len(points(metrics)) == 22


def steps(first: int, last: int, loss: float = 2.0) -> list[dict[str, Any]]:
    return [{"step": step, "loss": loss} for step in range(first, last + 1)]


def test_a_long_series_has_a_bounded_size_and_loses_neither_extremes_nor_the_mean() -> None:
    series = Series()
    for step in range(100_000):
        series.add(step, 50.0 if step == 7777 else float(step % 2))
    assert CAPACITY / 2 <= len(series.buckets) <= CAPACITY
    assert max(bucket.high for bucket in series.buckets) == 50.0
    assert sum(bucket.points for bucket in series.buckets) == 100_000
    assert sum(bucket.total for bucket in series.buckets) == 50_000 + 49
    assert [bucket.step for bucket in series.buckets] == sorted(bucket.step for bucket in series.buckets)


def test_damaged_lines_and_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n\0\0\0\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": null}\n')
    assert points(MetricsSeries(path)) == [(1, 1.0)]


def test_the_balance_of_experts_is_relative_to_an_even_share_of_their_layer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    layers = {"encoder": (10, 10, 10, 10), "decoder": (200, 0, 100, 100)}
    tokens = {
        f"tokens/{name}.mlp/expert_{n}": count for name, counts in layers.items() for n, count in enumerate(counts)
    }
    append(path, [{"step": 5, "starving_experts": 1, **tokens}])
    metrics = MetricsSeries(path)
    metrics.refresh()
    assert points(metrics, LOWEST_EXPERT) == [(5, 0.0)]
    assert points(metrics, HIGHEST_EXPERT) == [(5, 2.0)]
