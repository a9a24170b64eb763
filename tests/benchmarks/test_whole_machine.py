"""All layouts can be measured on 2, 4 and 8 ranks, their losses are of the same samples, and a tiny one is measured."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import loss_curves, whole_machine
from benchmarks.comparison import ON_ONE_RANK
from benchmarks.loss_curves import CurveJob
from benchmarks.measured_result import Result
from benchmarks.time_budget import OutOfTime
from benchmarks.whole_machine import layouts, loss_settings, speed_settings
from t5train.errors import LaunchError
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe

LAYOUTS = [(ranks, number) for ranks in (2, 4, 8) for number in range(len(layouts(8)))]


def spec_of(ranks: int, number: int, settings: Any, tiny: bool) -> RunSpec:
    layout = layouts(ranks)[number]
    return recipe(layout.recipe, {**settings(layout, ranks, tiny), "cluster.ranks": ranks})


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize(("ranks", "number"), LAYOUTS)
def test_every_layout_can_be_trained(ranks: int, number: int, tiny: bool) -> None:
    for settings in (speed_settings, loss_settings):
        assert spec_of(ranks, number, settings, tiny).gradient_accumulation >= 1


@pytest.mark.parametrize(("ranks", "number"), LAYOUTS)
def test_every_rank_has_as_many_sequences_as_in_the_recipe(ranks: int, number: int) -> None:
    spec, alone = spec_of(ranks, number, speed_settings, tiny=False), recipe(layouts(ranks)[number].recipe)
    assert spec.optimizer.global_batch_sequences * alone.cluster.ranks == alone.optimizer.global_batch_sequences * ranks
    assert spec.layout.micro_batch_sequences == alone.layout.micro_batch_sequences


@pytest.mark.parametrize(("ranks", "number"), LAYOUTS)
def test_losses_on_all_ranks_and_on_one_are_of_the_same_samples(ranks: int, number: int) -> None:
    spec = spec_of(ranks, number, loss_settings, tiny=False)
    names = [layout.name for layout in layouts(ranks)]
    compared_with = names.index(layouts(ranks)[number].alone or names[number])
    alone = samples_of(spec_of(ranks, compared_with, loss_settings, tiny=False).with_settings(ON_ONE_RANK))
    together = samples_of(spec)
    assert len(alone) == spec.optimizer.global_batch_sequences
    assert together == alone


def samples_of(spec: RunSpec) -> list[bytes]:
    """The inputs of all samples of a step, sorted."""
    size = spec.layout.micro_batch_sequences
    job = CurveJob(spec=spec, vocab_size=300, with_kernels=True, drawn_sequences=size)
    inputs = list[np.ndarray]()
    for rank in range(spec.data_parallel_size):
        with mock.patch("t5train.engine.collectives.data_rank", return_value=rank):
            inputs += [batch.inputs for batch in loss_curves._batches(job, 3)]
    return sorted(row.tobytes() for row in np.concatenate(inputs))


@pytest.mark.parametrize(("alone", "expected"), [([], 3 * 40), ([100], 100)], ids=["not yet measured", "measured once"])
def test_losses_on_one_rank_are_expected_to_take_longer(alone: list[float], expected: float) -> None:
    comparison: Any = SimpleNamespace(subject=SimpleNamespace(steps=200))
    durations = [("kernels", 40), *(("one rank", seconds) for seconds in alone)]
    found = [
        SimpleNamespace(subject=comparison.subject, variant=variant, duration_seconds=seconds)
        for variant, seconds in durations
    ]
    rows: Any = SimpleNamespace(like=lambda: found)
    assert loss_curves._expected_seconds(comparison, rows, "one rank") == expected
    assert loss_curves._expected_seconds(comparison, rows, "kernels") == 40


def test_what_fails_or_takes_too_long_is_followed_by_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: Any = SimpleNamespace(layout=layouts(8)[0], speed=SimpleNamespace(budget=SimpleNamespace(left=100)))
    taken = list[str]()

    def raising(error: Exception) -> Callable[[], object]:
        return mock.Mock(side_effect=error)

    there_are = [
        ("a", raising(LaunchError("died"))),
        ("b", raising(OutOfTime("long"))),
        ("c", lambda: taken.append("c")),
    ]
    monkeypatch.setattr(whole_machine, "_measurements", lambda _: there_are)
    assert whole_machine._measure_all([measured]) == 3
    assert taken == ["c"]
    measured.speed.budget.left = 0
    assert whole_machine._measure_all([measured, measured]) == 3
    assert taken == ["c"], "once the time is over, nothing is started"
    assert "base, a, failed: died" in capsys.readouterr().out


def test_layouts_that_do_not_exist_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["whole_machine", "--root", "never", "--ranks", "8", "--only", "base,pipeline"])
    with pytest.raises(SystemExit, match="2"):
        whole_machine.main()
    assert "--only names ['pipeline']: choose from base, moe" in capsys.readouterr().err
    assert not Path("never").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_tiny_layout_is_measured_once_on_two_ranks_and_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flows.cli.terminal.SECONDS_BETWEEN_LINES", 0)
    command = ["whole_machine", "--root", str(tmp_path), "--ranks", "2", "--tiny"]
    into = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [*command, "--only", "base", "--steps", "2", "--loss-steps", "3"])
    assert not whole_machine.main()
    first = capsys.readouterr()
    assert first.out.count("starts, expected") == 2
    assert first.out.startswith("base:\nours, repeat 1: starts")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--into", str(into)])
    assert not whole_machine.main()
    again = capsys.readouterr().out
    assert "starts, expected" not in again, "everything was measured"
    assert "base:" not in again
    shown = re.findall(r"^\d+ of (\d+) \(\d+ %\) steps", first.err, re.MULTILINE)
    assert {"9", "3"} <= set(shown), "both speed, with 7 more steps, and losses show their progress"
    (found,) = Result.model_validate_json(into.read_text("utf-8")).rows
    assert found["of linear"] == pytest.approx(found["tokens/s"] / (2 * found["tokens/s of one"]), abs=0.01)
    assert found["last loss"] == pytest.approx(found["last loss of one"], abs=2e-3)
    assert found["mean difference"] <= found["largest difference"] < 2e-3
