"""The attention kernels against float64: on a GPU where there is one, otherwise in Triton's interpreter."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.needed_triton import require_triton

HAS_GPU = torch.cuda.is_available()
require_triton()

# After require_triton, because the module imports Triton.
from t5train.model.kernels.biased_attention import biased_attention, table_of  # noqa: E402 - see above

DEVICE = "cuda" if HAS_GPU else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error, ||x - float64|| / ||float64||, of the output and of every gradient."""
ON_GPU = pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter computes bf16 wrongly, and takes too long")


class Case(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    d: int
    causal: bool = False
    has_bias: bool = True
    dtype: torch.dtype = torch.float16
    far: int = 128
    """The farthest distance with a bias of its own. A bias takes 2 * far + 3 programs, each ten milliseconds."""


CASES = {
    "shorter than a block": Case(1, 2, 3, 3, 32, far=16),
    "one short of a block": Case(1, 1, 63, 63, 32, far=16),
    "causal, one past a block": Case(2, 1, 65, 65, 32, causal=True, far=16),
    "far beyond the farthest distance": Case(1, 1, 205, 205, 32),
    "causal, far beyond": Case(1, 1, 205, 205, 32, causal=True),
    "more keys than queries": Case(2, 1, 70, 200, 64, far=64),
    "more queries than keys": Case(1, 1, 200, 70, 64, far=64),
    "cross-attention without a bias": Case(2, 2, 40, 130, 64, has_bias=False),
    "128 wide, causal": Case(2, 1, 130, 130, 128, causal=True, far=64),
}
GPU_CASES = {
    f"{name}, {dtype}".replace("torch.", ""): case._replace(dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16)
    for name, case in {
        **CASES,
        "encoder": Case(4, 12, 512, 512, 64),
        "decoder": Case(8, 12, 114, 114, 64, causal=True),
        "cross": Case(8, 12, 114, 512, 64, has_bias=False),
        "3b, v1.0": Case(2, 32, 512, 512, 128),
        "odd": Case(2, 3, 1000, 1000, 64),
    }.items()
}


class Inputs(NamedTuple):
    query: Tensor | None
    packed: Tensor
    bias: Tensor | None
    slope: Tensor

    @classmethod
    def of(cls, case: Case) -> "Inputs":
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        b, h, d = case.batch, case.heads, case.d
        query = noise(b, case.queries, h, d).to(case.dtype).requires_grad_() if case.keys != case.queries else None
        packed = noise(b, case.keys, 3 if query is None else 2, h, d).to(case.dtype)
        packed = (packed * torch.tensor([0.3, 0.3, 1.0], device=DEVICE)[-packed.shape[2] :, None, None]).to(case.dtype)
        bias = noise(h, 2 * case.far + 1).requires_grad_() if case.has_bias else None
        slope = noise(b, case.queries, h, d).to(case.dtype)
        return cls(query, packed.requires_grad_(), bias, slope)

    def differentiated(self) -> list[Tensor]:
        return [each for each in (self.query, self.packed, self.bias) if each is not None]


def _expected(inputs: Inputs, causal: bool, far: int) -> list[Tensor]:
    """Output and gradients in float64, by the definition."""
    leaves = {id(each): each.detach().double().requires_grad_() for each in inputs.differentiated()}
    packed = [part.transpose(1, 2) for part in leaves[id(inputs.packed)].unbind(2)]
    q = packed[0] if inputs.query is None else leaves[id(inputs.query)].transpose(1, 2)
    k, v = packed[-2:]
    scores = q @ k.transpose(2, 3)
    distance = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    if inputs.bias is not None:
        scores = scores + leaves[id(inputs.bias)][:, distance.clamp(-far, far) + far]
    if causal:
        scores = scores.masked_fill((distance > 0).to(DEVICE), float("-inf"))
    output = (functional.softmax(scores, -1) @ v).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, [*leaves.values()], inputs.slope.double())]


def _mixed(inputs: Inputs, causal: bool) -> Tensor:
    table = None if inputs.bias is None else table_of(inputs.bias)
    return biased_attention(inputs.query, inputs.packed, table, causal)


def _computed(inputs: Inputs, causal: bool) -> list[Tensor]:
    output = _mixed(inputs, causal)
    return [output.detach(), *torch.autograd.grad(output, inputs.differentiated(), inputs.slope)]


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of queries, keys and values one by one."""
    return [part for each in tensors for part in (each.unbind(2) if each.dim() == 5 else [each])]


def _check(case: Case) -> None:
    inputs = Inputs.of(case)
    computed = _computed(inputs, case.causal)
    for found, wanted in zip(_parts(computed), _parts(_expected(inputs, case.causal, case.far)), strict=True):
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error <= BOUNDS[case.dtype], error
    if HAS_GPU:
        assert all(map(torch.equal, computed, _computed(inputs, case.causal))), "two calls give different bits"


@pytest.mark.parametrize("case", [Case(1, 1, 3, 3, 32, far=16), Case(2, 1, 3, 5, 32, far=16)], ids=["self", "cross"])
def test_the_compiler_keeps_the_graph_whole(case: Case) -> None:
    inputs = Inputs.of(case)
    compiled = torch.compile(_mixed, fullgraph=True, backend="aot_eager")
    output = compiled(inputs, case.causal)
    found = [output.detach(), *torch.autograd.grad(output, inputs.differentiated(), inputs.slope)]
    assert all(map(torch.equal, found, _computed(inputs, case.causal)))


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the GPU takes more cases")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_of_float64(case: Case) -> None:
    _check(case)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_output_and_gradients_are_those_of_float64_on_a_gpu(case: Case) -> None:
    _check(case)
