"""The gated GELU operator against float64: on a GPU where there is one, otherwise in Triton's interpreter."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.needed_triton import require_triton

HAS_GPU = torch.cuda.is_available()
require_triton()

# After require_triton, because the module imports Triton.
from t5train.model.kernels.gated_gelu import gated_gelu  # noqa: E402 - see above

DEVICE = "cuda" if HAS_GPU else "cpu"
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""Largest relative error, ||x - float64|| / ||float64||."""


def _expected(joint: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    leaf = joint.detach().double().requires_grad_()
    gate, value = leaf.chunk(2, dim=-1)
    output = functional.gelu(gate, approximate="tanh") * value
    return output.detach(), torch.autograd.grad(output, leaf, slope.double())[0]


@pytest.mark.parametrize("shape", [(3, 2), (5, 7, 2 * 40), (2, 3, 2 * 1100)], ids=str)
@pytest.mark.parametrize("dtype", [*BOUNDS][: 3 if HAS_GPU else 2], ids=str)
def test_output_and_gradient_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    joint = (3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype).requires_grad_()
    slope = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(DEVICE, dtype)
    output = gated_gelu(joint)
    computed = (output.detach(), *torch.autograd.grad(output, joint, slope))
    for found, wanted in zip(computed, _expected(joint, slope), strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) <= BOUNDS[dtype]


def test_the_compiler_keeps_the_graph_whole() -> None:
    joint = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    output = torch.compile(gated_gelu, fullgraph=True, backend="aot_eager")(joint)
    assert torch.equal(output, gated_gelu(joint))
    assert torch.equal(*(torch.autograd.grad(each.sum(), joint)[0] for each in (output, gated_gelu(joint))))


def test_large_numbers_do_not_overflow() -> None:
    joint = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE, requires_grad=True)
    output = gated_gelu(joint)
    torch.testing.assert_close(output, torch.tensor([[0.0, 600.0]], device=DEVICE))
    (gradient,) = torch.autograd.grad(output.sum(), joint)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 3.0, 0.0, 200.0]], device=DEVICE))
