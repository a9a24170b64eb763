"""The gated GELU operator against float64: on a GPU where there is one, otherwise in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from t5train.model.counted_dropout import CountedDropout, dropped
from tests.support.needed_triton import require_triton

HAS_GPU = torch.cuda.is_available()
require_triton()

# After require_triton, because the module imports Triton.
from t5train.model.kernels.gated_gelu import gated_gelu  # noqa: E402 - see above

DEVICE = "cuda" if HAS_GPU else "cpu"
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""Largest relative error, ||x - float64|| / ||float64||."""


def _expected(joint: Tensor, slope: Tensor, keys: Tensor | None, rate: float) -> tuple[Tensor, Tensor]:
    leaf = joint.detach().double().requires_grad_()
    gate, value = leaf.chunk(2, dim=-1)
    output = functional.gelu(gate, approximate="tanh") * value
    if keys is not None:
        features = torch.arange(output.shape[-1], dtype=torch.int32, device=DEVICE)
        output = dropped(output, rate, keys, features)
    return output.detach(), torch.autograd.grad(output, leaf, slope.double())[0]


def _keys(*shape: int) -> Tensor:
    """Keys of tokens, in rows that are not contiguous: those of other tokens lie between."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (*shape, 2), generator=generator)[..., 0].to(DEVICE)


@pytest.mark.parametrize("shape", [(3, 2), (5, 7, 2 * 40), (2, 3, 2 * 1100)], ids=str)
@pytest.mark.parametrize("dtype", [*BOUNDS][: 3 if HAS_GPU else 2], ids=str)
@pytest.mark.parametrize("rate", [None, 0.1, 0.5])
def test_output_and_gradient_are_those_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, rate: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    joint = (3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype).requires_grad_()
    slope = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(DEVICE, dtype)
    keys = None if rate is None else _keys(*shape[:-1])
    output = gated_gelu(joint, keys, rate or 0.0)
    computed = (output.detach(), *torch.autograd.grad(output, joint, slope))
    for found, wanted in zip(computed, _expected(joint, slope, keys, rate or 0.0), strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) <= BOUNDS[dtype]


def test_dropout_drops_what_counted_dropout_drops_in_both_passes() -> None:
    joint, keys = torch.ones(3, 7, 2 * 1100, device=DEVICE, requires_grad=True), _keys(3, 7)
    output = gated_gelu(joint, keys, 0.1)
    (gradient,) = torch.autograd.grad(output.sum(), joint)
    kept = CountedDropout(0.1)(torch.ones_like(output), keys) != 0
    assert all(torch.equal(each != 0, kept) for each in (output, *gradient.chunk(2, dim=-1)))


@pytest.mark.parametrize("rate", [None, 0.1])
def test_the_compiler_keeps_the_graph_whole(rate: float | None) -> None:
    joint = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    arguments = (joint,) if rate is None else (joint, _keys(3), rate)
    compiled = torch.compile(gated_gelu, fullgraph=True, backend="aot_eager")(*arguments)
    eager = gated_gelu(*arguments)
    assert torch.equal(compiled, eager)
    assert torch.equal(*(torch.autograd.grad(each.sum(), joint)[0] for each in (compiled, eager)))


def test_large_numbers_do_not_overflow() -> None:
    joint = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE, requires_grad=True)
    output = gated_gelu(joint)
    torch.testing.assert_close(output, torch.tensor([[0.0, 600.0]], device=DEVICE))
    (gradient,) = torch.autograd.grad(output.sum(), joint)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 3.0, 0.0, 200.0]], device=DEVICE))
