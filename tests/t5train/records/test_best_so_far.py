"""The best checkpoint is decided from validations in their order, and training stops when it no longer changes."""

import math
from collections.abc import Iterable

import pytest

from t5train.records.best_so_far import BestSoFar
from t5train.spec import EvaluateSpec


def judged(values: Iterable[float | None], metric: str = "validation_exact_match") -> BestSoFar:
    evaluate, best = EvaluateSpec.model_validate({"best_metric": metric}), BestSoFar()
    for step, value in enumerate(values, start=1):
        best = best.after(step, value, evaluate.is_higher_better)
    return best


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.5, 0.7, 0.6], 2),
        ([0.5, 0.7, 0.7, 0.7], 2),
        ([math.nan, 0.1, math.nan], 2),
        ([0.0, math.inf, math.nan], 2),
        ([None, 0.0, -1.0], 2),
        ([math.nan, None], None),
    ],
)
def test_the_best_step_is_the_earliest_of_equal_ones_and_never_one_without_a_number(
    values: list[float | None], step: int | None
) -> None:
    assert judged(values).step == step


def test_the_lowest_loss_and_the_highest_accuracy_are_best() -> None:
    found = {
        metric: judged([2.0, 1.0, 3.0], metric).step for metric in ("validation_loss", "validation_token_accuracy")
    }
    assert found == {"validation_loss": 2, "validation_token_accuracy": 3}


@pytest.mark.parametrize(
    ("values", "is_over"),
    [([1, 1], False), ([1, 1, 1], True), ([1, 1, 2, 2], False), ([1, math.nan, 0], True), ([math.nan] * 2, True)],
)
def test_training_ends_after_two_validations_without_a_better_one(values: list[float], is_over: bool) -> None:
    assert EvaluateSpec(best_metric="validation_exact_match", patience=2).ends_training(judged(values)) == is_over
    assert not EvaluateSpec(best_metric="validation_exact_match").ends_training(judged(values))
