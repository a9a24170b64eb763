"""Learning rates by step."""

from itertools import pairwise

import pytest

from t5train.spec import OptimizerSpec
from t5train.train.learning_rate import learning_rate


def _optimizer(schedule: str, warmup_steps: int = 10) -> OptimizerSpec:
    values = {"schedule": schedule, "warmup_steps": warmup_steps, "num_steps": 100, "peak_learning_rate": 0.01}
    return OptimizerSpec.model_validate(values)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse-sqrt", "constant"])
def test_the_rate_rises_linearly_to_its_peak(schedule: str) -> None:
    optimizer = _optimizer(schedule)
    assert [learning_rate(optimizer, step) for step in (1, 5, 10)] == pytest.approx([0.001, 0.005, 0.01])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse-sqrt"])
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_the_rate_falls_after_its_peak(schedule: str, warmup_steps: int) -> None:
    optimizer = _optimizer(schedule, warmup_steps)
    rates = [learning_rate(optimizer, step) for step in range(max(1, warmup_steps), 101)]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < rates[0] <= optimizer.peak_learning_rate


def test_a_cosine_ends_at_the_final_rate_and_inverse_square_root_halves_with_four_times_the_steps() -> None:
    optimizer = _optimizer("cosine")
    assert learning_rate(optimizer, 100) == pytest.approx(optimizer.final_learning_rate)
    assert learning_rate(optimizer, 55) == pytest.approx((0.01 + optimizer.final_learning_rate) / 2)
    assert learning_rate(_optimizer("inverse-sqrt"), 40) == pytest.approx(0.005)


def test_a_linear_schedule_falls_in_equal_steps_to_exactly_the_final_rate() -> None:
    optimizer = _optimizer("linear")
    rates = [learning_rate(optimizer, step) for step in range(10, 101)]
    assert rates[-1] == optimizer.final_learning_rate
    falls = [before - after for before, after in pairwise(rates)]
    assert falls == pytest.approx([(0.01 - optimizer.final_learning_rate) / 90] * 90)
