"""The checks by themselves; tests/t5train/train/test_training.py seeds the same faults in real training."""

import math

import pytest
import torch

from t5train.errors import DuplicateBatch, NonFiniteLoss, RanksDisagree, TooManySkippedSteps, WeightsDidNotMove
from t5train.train import honesty


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_an_error_that_names_the_step(loss: float) -> None:
    with pytest.raises(NonFiniteLoss, match=rf"the loss is {loss} at step 7"):
        honesty.require_finite(7, loss, 1.0)


def test_a_gradient_norm_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(NonFiniteLoss, match="gradient norm is nan at step 7"):
        honesty.require_finite(7, 1.0, math.nan)


def test_a_step_the_scaler_skipped_has_no_norm_and_is_no_error() -> None:
    honesty.require_finite(7, 1.0, None)


def test_scaling_down_from_the_largest_first_scale_is_honest() -> None:
    honesty.require_few_skips(step=32, skipped=32)


@pytest.mark.parametrize(("step", "skipped"), [(2000, 1999), (60, 36), (1000, 83)])
def test_too_many_skipped_steps_are_an_error_with_both_numbers(step: int, skipped: int) -> None:
    with pytest.raises(TooManySkippedSteps, match=rf"{skipped} of {step} optimizer steps"):
        honesty.require_few_skips(step, skipped)


def test_two_ranks_with_one_batch_are_named() -> None:
    with pytest.raises(DuplicateBatch, match="ranks 1 and 3"):
        honesty.require_distinct_batches(5, [10, 11, 12, 11], data_parallel_size=4)


def test_stages_of_a_pipeline_must_have_the_same_batch() -> None:
    honesty.require_distinct_batches(5, [10, 11, 10, 11], data_parallel_size=2)
    with pytest.raises(RanksDisagree, match="ranks 1 and 3, stages of one pipeline"):
        honesty.require_distinct_batches(5, [10, 11, 10, 12], data_parallel_size=2)


def test_weights_that_stay_are_an_error_only_if_steps_were_applied() -> None:
    weights = [torch.ones(10)]
    movement = honesty.Movement(weights, applied_steps=3)
    movement.require(step=9, applied_steps=3)
    with pytest.raises(WeightsDidNotMove, match="2 optimizer steps up to step 11"):
        movement.require(step=11, applied_steps=5)


def test_the_smallest_change_of_a_sampled_weight_is_movement() -> None:
    weights = [torch.ones(10)]
    movement = honesty.Movement(weights, applied_steps=0)
    weights[0][3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    movement.require(step=1, applied_steps=1)
