"""What benchmarks.training_peers tries, keeps and shows, without the training."""

from pathlib import Path

import pytest

from benchmarks.peer_outcomes import (
    OURS,
    TRIAL,
    Outcome,
    Outcomes,
    Subject,
    Tuning,
    fastest,
    next_trial,
    table,
    untuned,
    write_section,
)

SUBJECT = Subject(recipe="smoke", settings=(), ranks=1, device="CPU")


def outcome(contender: str, repeat: int, tuning: Tuning, seconds: float | None, subject: Subject = SUBJECT) -> Outcome:
    return Outcome(
        subject=subject,
        contender=contender,
        repeat=repeat,
        tuning=tuning,
        finished_at="2026-11-24T00:00:00+00:00",
        versions={},
        out_of_memory=seconds is None,
        step_seconds=[] if seconds is None else [seconds],
        tokens_a_step=1000,
    )


def tried_in_order(seconds: dict[Tuning, float | None], largest: int) -> tuple[list[Tuning], Tuning | None]:
    """All trials of a micro-batch of 32 with two kinds of attention, and the tuning that is chosen in the end."""
    tried: list[Outcome] = []
    while trial := next_trial(32, largest, ("sdpa", "eager"), tried):
        tried.append(outcome("deepspeed", TRIAL, trial, seconds.get(trial)))
    return [each.tuning for each in tried], fastest(tried)


def test_the_faster_attention_is_tried_with_twice_and_half_the_micro_batch() -> None:
    seconds = {Tuning(32, "sdpa"): 2.0, Tuning(32, "eager"): 1.0, Tuning(64, "eager"): 0.9, Tuning(16, "eager"): 1.1}
    assert tried_in_order(seconds, largest=128) == (list(seconds), Tuning(64, "eager"))


def test_a_micro_batch_above_the_global_batch_is_not_tried() -> None:
    seconds = {Tuning(32, "sdpa"): 1.0, Tuning(32, "eager"): 2.0, Tuning(16, "sdpa"): 1.1}
    assert tried_in_order(seconds, largest=32) == (list(seconds), Tuning(32, "sdpa"))


def test_micro_batches_are_halved_until_one_fits() -> None:
    tried, chosen = tried_in_order({Tuning(8, "sdpa"): 1.0}, largest=128)
    assert tried == [Tuning(32, "sdpa"), Tuning(32, "eager"), Tuning(16, "sdpa"), Tuning(8, "sdpa")]
    assert chosen == Tuning(8, "sdpa")


def test_a_peer_that_never_fits_is_given_up() -> None:
    tried, chosen = tried_in_order({}, largest=128)
    assert tried[-1] == Tuning(1, "sdpa")
    assert chosen is None


def test_an_untuned_peer_halves_its_micro_batch_when_it_is_out_of_memory() -> None:
    full = [outcome("trainer", 1, Tuning(size), None) for size in (32, 16)]
    assert untuned(32, []) == Tuning(32)
    assert untuned(32, full) == Tuning(8)
    assert untuned(16, [outcome("trainer", 1, Tuning(size), None) for size in (16, 8, 4, 2, 1)]) is None


def test_finished_measurements_are_read_again_even_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    elsewhere = Subject(recipe="smoke", settings=(), ranks=2, device="CPU")
    Outcomes(path, elsewhere).add(outcome(OURS, 1, Tuning(32), 1.0, elsewhere))
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"subject": ')
    Outcomes(path, SUBJECT).add(outcome(OURS, 2, Tuning(32), 1.0))
    found = Outcomes(path, SUBJECT)
    assert found.has(OURS, 2, Tuning(32))
    assert not found.has(OURS, 1, Tuning(32))


def test_the_table_compares_rounds_and_leaves_trials_out(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "outcomes.jsonl", SUBJECT)
    for repeat, ours, peer in ((1, 1.0, 2.0), (2, 2.0, 3.0), (3, 1.0, 4.0)):
        outcomes.add(outcome(OURS, repeat, Tuning(32), ours))
        outcomes.add(outcome("pytorch", repeat, Tuning(32), peer))
    outcomes.add(outcome("pytorch", TRIAL, Tuning(32), 100.0))
    outcomes.add(outcome("trainer", 1, Tuning(1), None))
    ours, trainer, pytorch = table(outcomes, (OURS, "trainer", "pytorch", "deepspeed")).splitlines()[2:]
    assert ours.startswith("| ours | 1,000 (500 to 1,000) | 1000.0 (1000.0 to 2000.0) |  |")
    assert "| trainer | out of memory |" in trainer
    assert "| 2.00 (1.50 to 4.00) |" in pytorch


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_section_is_appended_once_and_then_replaced(tmp_path: Path, rounds: int) -> None:
    document = tmp_path / "document.md"
    document.write_text("# Title\n", "utf-8")
    for number in range(rounds):
        write_section(document, "smoke", f"text {number}")
        write_section(document, "base", "other")
    text = document.read_text("utf-8")
    assert text.count("<!-- made by smoke -->\n") == text.count("<!-- end of what smoke made -->") == 1
    assert f"text {rounds - 1}\n" in text
    assert "# Title\n" in text
    assert text.count("other") == 1
