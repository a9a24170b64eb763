"""Sums of 16-bit gradients by themselves; test_training.py tests them in DeepSpeed's engines."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from t5train.engine.gradient_accumulation import Fp32Sums, sums_of
from t5train.spec.recipes import recipe


@given(st.integers(1, 128), st.integers(0, 1000), st.sampled_from([torch.bfloat16, torch.float16]))
def test_the_sum_of_any_number_of_passes_is_rounded_once(passes: int, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(8, 4, bias=False, dtype=dtype)
    sums, exact = Fp32Sums(layer), torch.zeros(4, 8)
    for inputs in torch.randn(passes, 3, 8).to(dtype):
        (gradient,) = torch.autograd.grad(layer(inputs).sum(), layer.weight)
        exact += gradient.float()
        layer(inputs).sum().backward()
        assert layer.weight.grad is None
    sums.hand_over()
    assert layer.weight.grad.equal(exact.to(dtype))


@pytest.mark.parametrize("are_kept", [False, True])
def test_every_step_starts_from_a_zero_sum_also_where_sums_stay_in_the_same_memory(are_kept: bool) -> None:
    layer = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    sums = Fp32Sums(layer)
    total = sums.keep()[layer.weight] if are_kept else None
    for passes in (3, 1):
        for _ in range(passes):
            layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        assert total is None or total.tolist() == [[passes, passes]]
        sums.hand_over()
        assert layer.weight.grad.tolist() == [[passes, passes]]
        assert total is None or not total.any()
        layer.weight.grad = None


@pytest.mark.parametrize(
    ("stage", "precision", "micro", "summed_in_fp32"),
    [
        (1, "bf16", 16, True),
        (1, "fp16", 16, True),
        (1, "bf16", 32, False),
        (1, "fp32", 16, False),
        (2, "bf16", 16, False),
    ],
)
def test_gradients_are_summed_in_fp32_only_where_deepspeed_does_not_do_it(
    stage: int, precision: str, micro: int, summed_in_fp32: bool
) -> None:
    settings = {"layout.zero_stage": stage, "optimizer.precision": precision, "layout.micro_batch_sequences": micro}
    spec = recipe("smoke").with_settings(settings)
    assert (sums_of(nn.Linear(1, 1), spec) is not None) == summed_in_fp32
