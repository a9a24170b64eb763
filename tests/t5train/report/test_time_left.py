"""The time that training still takes is estimated from recent steps, also after a resume."""

import pytest

from t5train.report.time_left import WINDOW_SECONDS, TimeLeft, duration


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
    assert left.seconds(62.0, 1, 100) == pytest.approx(99 * 3)


def test_after_a_resume_only_steps_since_then_count() -> None:
    left = TimeLeft()
    for second in range(100):
        left.seconds(float(second), 10 * second, 10_000)
    for second in range(100, 200):
        assert left.seconds(float(second), 500, 10_000) is None
    assert left.seconds(201.0, 501, 10_000) == pytest.approx(9499 * 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (179.6, "3 min 0 s"), (3599, "59 min"), (7_800, "2 h 10 min"), (266_400, "3 d 2 h")],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
