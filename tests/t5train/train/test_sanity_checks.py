"""The sanity checks by themselves; tests/t5train/train/test_training.py plants the same faults in real training."""

import math
from typing import Any

import pytest
import torch

from t5train.errors import DuplicateBatch, NonFiniteLoss, RanksDisagree, TooManySkippedSteps, WeightsDidNotMove
from t5train.train import sanity_checks


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_an_error_that_names_the_step(loss: float) -> None:
    with pytest.raises(NonFiniteLoss, match=rf"the loss is {loss} at step 7"):
        sanity_checks.require_finite(7, loss, 1.0)


def test_a_gradient_norm_that_is_not_finite_is_an_error_and_none_of_a_skipped_step_is_not() -> None:
    with pytest.raises(NonFiniteLoss, match="gradient norm is nan at step 7"):
        sanity_checks.require_finite(7, 1.0, math.nan)
    sanity_checks.require_finite(7, 1.0, None)


@pytest.mark.parametrize(("step", "skipped"), [(2000, 1999), (60, 36), (1000, 83)])
def test_too_many_skipped_steps_are_an_error_with_both_numbers(step: int, skipped: int) -> None:
    sanity_checks.require_few_skips(step=32, skipped=32)  # while the largest initial loss scale falls
    with pytest.raises(TooManySkippedSteps, match=rf"{skipped} of {step} optimizer steps"):
        sanity_checks.require_few_skips(step, skipped)


def test_two_ranks_with_the_same_batch_are_an_error_that_names_them() -> None:
    with pytest.raises(DuplicateBatch, match="ranks 1 and 3"):
        sanity_checks.require_distinct_batches(5, [10, 11, 12, 11], data_parallel_size=4)


def test_stages_of_a_pipeline_must_have_the_same_batch() -> None:
    sanity_checks.require_distinct_batches(5, [10, 11, 10, 11], data_parallel_size=2)
    with pytest.raises(RanksDisagree, match="ranks 1 and 3, stages of one pipeline"):
        sanity_checks.require_distinct_batches(5, [10, 11, 10, 12], data_parallel_size=2)


def moving(parts: list[list[torch.Tensor]], *others: list[int], applied: int = 0, ranks: int = 2) -> Any:
    """A check of the movement of these parts, next to ranks that report ``others``."""
    return sanity_checks.Movement(parts, applied, ranks, gather=lambda values: [list(values), *others])


def test_unchanged_weights_are_an_error_only_if_steps_were_applied_and_the_smallest_change_counts() -> None:
    weights = torch.ones(10)
    movement = moving([[weights]], applied=3, ranks=1)
    movement.require(step=9, applied_steps=3)
    with pytest.raises(WeightsDidNotMove, match="2 optimizer steps up to step 11"):
        movement.require(step=11, applied_steps=5)
    movement = moving([[weights]], ranks=1)
    weights[3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    movement.require(step=1, applied_steps=1)


def test_an_unchanged_part_is_allowed_if_another_part_of_its_group_moved() -> None:
    parts = [[torch.ones(10)]]
    moving(parts, [0], [1], ranks=3).require(step=1, applied_steps=1)
    with pytest.raises(WeightsDidNotMove, match="on ranks 0 to 2"):
        moving(parts, [0], [0], ranks=3).require(step=1, applied_steps=1)


def test_experts_unchanged_on_all_ranks_are_an_error_even_if_the_rest_moves() -> None:
    dense, experts = torch.ones(10), torch.ones(10)
    movement = moving([[dense], [experts]], [1, 0])
    dense += 1
    with pytest.raises(WeightsDidNotMove, match="of a parameter group"):
        movement.require(step=1, applied_steps=1)


def test_an_unchanged_pipeline_stage_is_an_error_even_if_the_others_move() -> None:
    weights = torch.ones(10)
    movement = moving([[weights]], [1], [0], [0])
    weights += 1
    with pytest.raises(WeightsDidNotMove, match="on ranks 2 to 3"):
        movement.require(step=1, applied_steps=1)
