"""The time that work still takes is estimated from how fast it was done recently, and only once that is steady."""

from collections.abc import Sequence
from itertools import accumulate

import pytest

from t5train.report.time_left import WINDOW_SECONDS, TimeLeft, duration, seconds_of_steps


def test_the_rate_of_the_last_minutes_counts() -> None:
    left = TimeLeft()
    for second in range(1000):
        left.seconds(float(second), second, 100_000)  # one step per second
    for second in range(1000, 1000 + 2 * int(WINDOW_SECONDS)):
        found = left.seconds(float(second), 1000 + 4 * (second - 1000), 100_000)  # then four
    assert found == pytest.approx((100_000 - 1000 - 4 * (2 * WINDOW_SECONDS - 1)) / 4, rel=0.01)


def test_nothing_is_estimated_before_the_first_progress_and_starting_does_not_count() -> None:
    left = TimeLeft()
    assert {left.seconds(float(second), 0, 100) for second in range(60)} == {None}
    found = [left.seconds(59.0 + 3 * step, step, 100) for step in range(1, 10)]
    assert found[0] is None, "it is the first step"
    assert found[-1] == pytest.approx(91 * 3)


def test_after_a_resume_only_steps_since_then_count() -> None:
    left = TimeLeft()
    for second in range(100):
        left.seconds(float(second), 10 * second, 10_000)
    for second in range(100, 200):
        assert left.seconds(float(second), 500, 10_000) is None
    found = [left.seconds(199.0 + 30 * step, 500 + step, 10_000) for step in range(1, 12)]
    assert found[0] is None
    assert found[-1] == pytest.approx(9489 * 30)


def _watched(seconds_of_units: Sequence[float], polled_every: float = 0.5) -> list[tuple[float, float | None]]:
    """The true and the estimated time left at each look at work whose units take so many seconds."""
    left, found = TimeLeft(), list[tuple[float, float | None]]()
    ends, total = [*accumulate(seconds_of_units)], len(seconds_of_units)
    done, now = 0, 0.0
    while done < total:
        found.append((ends[-1] - now, left.seconds(now, done, total)))
        now += polled_every
        while done < total and ends[done] <= now:
            done += 1
    return found


@pytest.mark.parametrize("compiling", [[17.5], [17.5, 13.0], [17.5, 13.0, 12.0], [60.0, 20.0, 20.0, 1.0], []])
@pytest.mark.parametrize("seconds", [0.05, 0.18, 3.0])
def test_steps_that_include_compilation_give_no_time_left(compiling: list[float], seconds: float) -> None:
    found = _watched([*compiling, *[seconds] * 1000])
    before = len(compiling) and int(sum(compiling) / 0.5)
    assert {estimate for _, estimate in found[:before]} <= {None}
    known = [(truth, estimate) for truth, estimate in found if estimate is not None]
    assert all(0.5 * truth - 5 <= estimate <= 2 * truth + 5 for truth, estimate in known)
    assert len(known) >= 0.6 * (len(found) - before)


def test_small_files_that_are_read_first_give_no_time_left() -> None:
    left, total = TimeLeft(), 10**11
    small = [left.seconds(float(second), 10_000 * second, total) for second in range(60)]
    large = [left.seconds(60.0 + second, 10**9 * second, total) for second in range(1, 60)]
    assert set(small) == {None}
    assert large[-1] == pytest.approx(41, rel=0.05)


def test_a_long_pause_gives_no_time_left_and_a_short_one_counts() -> None:
    left = TimeLeft()
    for second in range(100):
        before = left.seconds(float(second), second, 1000)
    paused = [left.seconds(100.0 + second, 99, 1000) for second in range(400)]
    assert before == pytest.approx(901)
    assert paused[10] == pytest.approx(901 * 110 / 99)
    assert paused[-1] is None


def test_other_work_and_another_total_are_estimated_anew() -> None:
    left = TimeLeft()
    texts = [left.text(float(second), f"files read, {second} MB", second, 100) for second in range(20)]
    assert texts[-1] == ", 1 min 21 s left"
    assert left.text(21.0, "files read, 21 MB", 21, 1000) == ""
    for second in range(22, 40):
        text = left.text(float(second), "files read", second, 1000)
    assert text == ", 16 min left"
    assert left.text(41.0, "files hashed", 41, 1000) == left.text(42.0, "files hashed", 42, None) == ""


def test_the_last_steps_give_the_time_left_of_a_run_without_those_that_compiled() -> None:
    assert seconds_of_steps([0.5] * 8, 8, 1008) == 500
    assert seconds_of_steps([17.0, 13.0, *[0.5] * 20], 22, 1022) == pytest.approx(500)
    assert seconds_of_steps([17.0, 13.0, *[0.5] * 3], 5, 1000) is None
    assert seconds_of_steps([], 0, 1000) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (179.6, "3 min 0 s"), (3599, "59 min"), (7_800, "2 h 10 min"), (266_400, "3 d 2 h")],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
