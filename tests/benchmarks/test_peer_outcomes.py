"""What benchmarks.training_peers tries, keeps and shows, without the training."""

from pathlib import Path

import pytest

from benchmarks.finished_rows import Subject
from benchmarks.measured_result import Spread
from benchmarks.peer_outcomes import (
    ALONE,
    FIRST_GUESS_SECONDS,
    OURS,
    TRIAL,
    Outcome,
    Outcomes,
    Tuning,
    fastest,
    next_trial,
    rows,
    untuned,
)
from benchmarks.training_peers import in_order
from benchmarks.training_scaling import rows as scaling_rows

CONDITIONS = {"device": "CPU", "machine": "here", "code": "0123", "versions": (("torch", "2.13"),)}
SUBJECT = Subject(recipe="smoke", settings=(), ranks=1, steps=20, **CONDITIONS)


def outcome(
    contender: str, repeat: int, tuning: Tuning, seconds: float | None, subject: Subject = SUBJECT, took: float = 60.0
) -> Outcome:
    return Outcome(
        subject=subject,
        commit="abc",
        duration_seconds=took,
        contender=contender,
        repeat=repeat,
        tuning=tuning,
        finished_at="2026-11-24T00:00:00+00:00",
        out_of_memory=seconds is None,
        step_seconds=() if seconds is None else (seconds,),
        tokens_a_step=1000,
    )


def elsewhere(**changes: object) -> Subject:
    return SUBJECT.model_copy(update=changes)


@pytest.mark.parametrize(
    ("seconds", "largest", "tried", "chosen"),
    [
        ({"32 sdpa": 2.0, "32 eager": 1.0, "64 eager": 0.9, "16 eager": 1.1}, 128, None, "64 eager"),
        ({"32 sdpa": 1.0, "32 eager": 2.0, "16 sdpa": 1.1}, 32, None, "32 sdpa"),
        ({"8 sdpa": 1.0}, 128, ["32 sdpa", "32 eager", "16 sdpa", "8 sdpa"], "8 sdpa"),
        ({}, 128, ["32 sdpa", "32 eager", "16 sdpa", "8 sdpa", "4 sdpa", "2 sdpa", "1 sdpa"], None),
    ],
    ids=["twice and half with the faster attention", "none above the global batch", "until one fits", "none fits"],
)
def test_micro_batches_and_attentions_are_tried_until_the_fastest_is_known(
    seconds: dict[str, float], largest: int, tried: list[str] | None, chosen: str | None
) -> None:
    found: dict[str, Outcome] = {}
    while trial := next_trial(32, largest, ("sdpa", "eager"), [*found.values()]):
        name = f"{trial.micro_batch_sequences} {trial.attention}"
        found[name] = outcome("deepspeed", TRIAL, trial, seconds.get(name))
    fast = fastest([*found.values()])
    assert list(found) == (tried or list(seconds))
    assert (fast and f"{fast.micro_batch_sequences} {fast.attention}") == chosen


def test_an_untuned_peer_halves_its_micro_batch_when_it_is_out_of_memory() -> None:
    full = [outcome("trainer", 1, Tuning(size), None) for size in (32, 16)]
    assert untuned(32, []) == Tuning(32)
    assert untuned(32, full) == Tuning(8)
    assert untuned(16, [outcome("trainer", 1, Tuning(size), None) for size in (16, 8, 4, 2, 1)]) is None


def test_finished_measurements_are_read_again_even_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    two = elsewhere(ranks=2)
    Outcomes(path, two).add(outcome(OURS, 1, Tuning(32), 1.0, two))
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"subject": ')
    Outcomes(path, SUBJECT).add(outcome(OURS, 2, Tuning(32), 1.0))
    found = Outcomes(path, SUBJECT)
    assert found.has(OURS, 2, Tuning(32))
    assert not found.has(OURS, 1, Tuning(32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"code": "4567"}, "other code"),
        ({"machine": "there", "device": "GPU"}, "another machine, another device"),
        ({"versions": (("torch", "2.14"),)}, "other versions"),
        ({"steps": 10}, "another number of steps"),
    ],
)
def test_measurements_under_other_conditions_are_named_and_not_used(
    change: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "outcomes.jsonl", elsewhere(**change)
    Outcomes(path, other).add(outcome(OURS, 1, Tuning(32), 1.0, other))
    assert capsys.readouterr().out == ""
    found = Outcomes(path, SUBJECT)
    assert not found.has(OURS, 1, Tuning(32))
    assert capsys.readouterr().out == f"{path}: 1 measurements are not used: 1 of {reason}\n"


def test_a_measurement_is_expected_to_take_as_long_as_the_last_one_that_is_like_it(tmp_path: Path) -> None:
    path, before = tmp_path / "outcomes.jsonl", elsewhere(code="4567", machine="there")
    outcomes = Outcomes(path, before)
    assert outcomes.expected_seconds(OURS, Tuning(32)) == FIRST_GUESS_SECONDS
    for contender, size, took in ((OURS, 32, 90.0), (OURS, 32, 40.0), ("trainer", 32, 50.0), ("trainer", 16, 70.0)):
        outcomes.add(outcome(contender, 1, Tuning(size), 1.0, before, took))
    now = Outcomes(path, SUBJECT)
    assert now.expected_seconds(OURS, Tuning(32)) == 40
    assert now.expected_seconds("trainer", Tuning(8)) == 70
    assert now.expected_seconds("pytorch", Tuning(32)) == 90


def test_tuned_peers_come_after_all_repeats_of_the_others() -> None:
    order = [*in_order(("deepspeed", "pytorch", OURS, "trainer"), repeats=2)]
    others = [(contender, repeat) for repeat in (1, 2) for contender in (OURS, "trainer", "pytorch")]
    assert order == [*others, ("deepspeed", 1), ("deepspeed", 2)]


def test_four_ranks_are_compared_with_one_of_the_same_round(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "outcomes.jsonl", SUBJECT)
    for repeat, alone in ((1, 1.0), (2, 2.0)):
        outcomes.add(outcome(ALONE, repeat, Tuning(32), alone))
        outcomes.add(outcome(OURS, repeat, Tuning(32), 0.5))
    one, four = scaling_rows(outcomes, 4)
    assert (one["accelerators"], one["tokens/s"]) == (1, Spread(median=750, min=500, max=1000))
    assert (four["accelerators"], four["tokens/s"], four["step, ms"]) == (4, 2000, 500)
    assert four["of linear"] == Spread(median=0.75, min=0.5, max=1.0)


def test_rounds_are_compared_and_trials_left_out(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "outcomes.jsonl", SUBJECT)
    for repeat, ours, peer in ((1, 1.0, 2.0), (2, 2.0, 3.0), (3, 1.0, 4.0)):
        outcomes.add(outcome(OURS, repeat, Tuning(32), ours))
        outcomes.add(outcome("pytorch", repeat, Tuning(32), peer))
    outcomes.add(outcome("pytorch", TRIAL, Tuning(32), 100.0))
    outcomes.add(outcome("trainer", 1, Tuning(1), None))
    ours, trainer, pytorch = rows(outcomes, (OURS, "trainer", "pytorch", "deepspeed"))
    assert ours["contender"] == "ours"
    assert ours["tokens/s"] == Spread(median=1000, min=500, max=1000)
    assert ours["step, ms"] == Spread(median=1000, min=1000, max=2000)
    assert ours["ours relative to it"] is None
    assert (trainer["contender"], trainer["tokens/s"]) == ("trainer", "out of memory")
    assert pytorch["ours relative to it"] == Spread(median=2.0, min=1.5, max=4.0)
