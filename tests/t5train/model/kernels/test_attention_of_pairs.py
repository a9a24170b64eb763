"""The attention kernels on rows of pairs against the same without kernels, in float64.

On a GPU where there is one, otherwise in Triton's interpreter.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from t5train.model.attention import AttentionRows, sees
from t5train.model.counted_dropout import branch, dropped
from tests.support.needed_triton import require_triton

HAS_GPU = torch.cuda.is_available()
require_triton()

# After require_triton, because the module imports Triton.
from t5train.model.kernels.biased_attention import biased_attention, table_of  # noqa: E402 - see above
from t5train.model.kernels.segment_tiles import BLOCK, segment_tiles  # noqa: E402 - see above

DEVICE = "cuda" if HAS_GPU else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error, ||x - float64|| / ||float64||, of the output and of every gradient."""
KIND = torch.float16 if HAS_GPU else torch.float32
RATE = 0.1
Lengths = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """``lengths`` are those of the pairs of each row, one after the other from its start; the rest is padding."""

    n: int
    lengths: Lengths
    memory_n: int = 0
    memory_lengths: Lengths = ()
    causal: bool = False
    has_bias: bool = True
    heads: int = 2
    d: int = 32
    rate: float = RATE
    dtype: torch.dtype = torch.float32
    far: int = 16

    @property
    def is_cross(self) -> bool:
        return self.memory_n > 0


CASES = {
    "encoder, ragged, an empty row": Case(150, ((3, 70, 20, 1), (), (150,), (64, 64))),
    "encoder, no dropout": Case(130, ((1, 60, 40), (130,)), rate=0.0),
    "decoder": Case(135, ((50, 3, 80), (135,)), causal=True),
    "decoder, no dropout, 64 wide, fp16": Case(
        70, ((66, 4), (9, 9)), causal=True, rate=0.0, heads=1, d=64, dtype=torch.float16
    ),
    "cross, a source and a target are missing": Case(
        70, ((5, 30, 12), (70,), (1, 0, 66)), 140, ((100, 0, 3), (140,), (3, 60, 70)), has_bias=False
    ),
    "cross, no dropout, 128 wide": Case(
        20, ((5, 9), (20,)), 90, ((70, 20), (0,)), has_bias=False, rate=0.0, heads=1, d=128
    ),
    "cross, with a bias": Case(70, ((5, 64), (1, 2)), 200, ((100, 60), (3, 197)), heads=1),
}
GPU_CASES = {
    f"{name}, {dtype}".replace("torch.", ""): case._replace(dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16)
    for name, case in {
        **CASES,
        # With a near end, most of a query's keys would share an entry, and their gradients cancel but for rounding.
        "cross, with a bias": CASES["cross, with a bias"]._replace(far=128),
        "encoder of packed rows": Case(512, (tuple(range(1, 31)), (17,) * 30, (256, 256)) * 3, heads=12, d=64, far=128),
        "decoder of packed rows": Case(
            256, (tuple(range(1, 22)), (17,) * 15, (250,)) * 3, causal=True, heads=12, d=64, far=128
        ),
        "cross of packed rows": Case(
            256, ((17,) * 15, (5,) * 30) * 4, 512, ((34,) * 15, (16,) * 30) * 4, has_bias=False, heads=12, d=64
        ),
        "128 wide, without dropout": Case(512, ((100,) * 5, (511,)), heads=8, d=128, rate=0.0, far=128),
        "causal, 128 wide": Case(512, ((100,) * 5, (511,)), causal=True, heads=8, d=128, far=128),
    }.items()
}


class Inputs(NamedTuple):
    query: Tensor | None
    packed: Tensor
    bias: Tensor | None
    slope: Tensor
    rows: AttentionRows

    @classmethod
    def of(cls, case: Case) -> "Inputs":
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        def keys(n: int) -> Tensor:
            return torch.randint(-(1 << 63), (1 << 63) - 1, (b, n), generator=generator).to(DEVICE)

        b, h, d, nk = len(case.lengths), case.heads, case.d, case.memory_n or case.n
        query = noise(b, case.n, h, d).to(case.dtype).requires_grad_() if case.is_cross else None
        packed = noise(b, nk, 2 if case.is_cross else 3, h, d)
        packed = (packed * torch.tensor([0.3, 0.3, 1.0], device=DEVICE)[-packed.shape[2] :, None, None]).to(case.dtype)
        bias = noise(h, 2 * case.far + 1).requires_grad_() if case.has_bias else None
        segments = _segments(case.n, case.lengths)
        memory_segments = _segments(nk, case.memory_lengths) if case.is_cross else segments
        rows = AttentionRows(segments, memory_segments, None, None)
        if case.rate:
            rows = rows._replace(keys=keys(case.n), memory_keys=keys(nk))
        # Nothing depends on padding, so no gradient gets there.
        slope = (noise(b, case.n, h, d) * (segments > 0)[:, :, None, None]).to(case.dtype)
        return cls(query, packed.requires_grad_(), bias, slope, rows)

    def differentiated(self) -> list[Tensor]:
        return [each for each in (self.query, self.packed, self.bias) if each is not None]


def _segments(n: int, lengths: Lengths) -> Tensor:
    rows = torch.zeros(len(lengths), n, dtype=torch.int32)
    for row, each in zip(rows, lengths, strict=True):
        numbers = torch.repeat_interleave(torch.arange(1, len(each) + 1), torch.tensor(each, dtype=torch.int64))
        row[: len(numbers)] = numbers[:n]
    return rows.to(DEVICE)


def _expected(inputs: Inputs, case: Case) -> list[Tensor]:
    """Output and gradients in float64, as Attention computes them without a kernel; 0 of what sees nothing."""
    leaves = {id(each): each.detach().double().requires_grad_() for each in inputs.differentiated()}
    packed = [part.transpose(1, 2) for part in leaves[id(inputs.packed)].unbind(2)]
    q = packed[0] if inputs.query is None else leaves[id(inputs.query)].transpose(1, 2)
    k, v = packed[-2:]
    rows, scores = inputs.rows, q @ k.transpose(2, 3)
    distance = torch.arange(k.shape[2], device=DEVICE)[None, :] - torch.arange(q.shape[2], device=DEVICE)[:, None]
    if inputs.bias is not None:
        scores = scores + leaves[id(inputs.bias)][:, distance.clamp(-case.far, case.far) + case.far]
    lowest, is_seen = torch.finfo(scores.dtype).min, sees(rows.segments, rows.memory_segments)
    if case.causal:
        is_seen = is_seen & (distance <= 0)
    sees_some = (rows.segments[:, :, None] == rows.memory_segments[:, None]).any(-1) & (rows.segments > 0)
    weights = torch.where(is_seen, scores, lowest).softmax(-1) * sees_some[:, None, :, None]
    if rows.keys is not None and rows.memory_keys is not None:
        heads = torch.arange(case.heads, device=DEVICE)[:, None]
        weights = dropped(
            weights, case.rate, branch(rows.keys.unsqueeze(1), heads), rows.memory_keys.int()[:, None, None]
        )
    output = (weights @ v).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, [*leaves.values()], inputs.slope.double())]


def _mixed(inputs: Inputs, case: Case) -> Tensor:
    table = None if inputs.bias is None else table_of(inputs.bias)
    return biased_attention(inputs.query, inputs.packed, table, case.causal, inputs.rows, case.rate)


def _computed(inputs: Inputs, case: Case, mixed: Callable[[Inputs, Case], Tensor] = _mixed) -> list[Tensor]:
    output = mixed(inputs, case)
    return [output.detach(), *torch.autograd.grad(output, inputs.differentiated(), inputs.slope)]


def _check(case: Case) -> None:
    inputs = Inputs.of(case)
    computed = _computed(inputs, case)
    for found, wanted in zip(_parts(computed), _parts(_expected(inputs, case)), strict=True):
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error <= BOUNDS[case.dtype], error
    if HAS_GPU:
        assert all(map(torch.equal, computed, _computed(inputs, case))), "two calls give different bits"


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of queries, keys and values one by one."""
    return [part for each in tensors for part in (each.unbind(2) if each.dim() == 5 else [each])]


def test_tiles_without_a_common_segment_are_not_read() -> None:
    """Keys of another segment, and padding, are not numbers: a product with 0 would not be one either."""
    of_blocks = torch.tensor([3, 1, 2, 0, 4], dtype=torch.int32, device=DEVICE)
    case = Case(64, ((30, 34),), len(of_blocks) * BLOCK, ((),), heads=1, dtype=KIND)
    inputs = Inputs.of(case)
    memory_segments = of_blocks.repeat_interleave(BLOCK)[None]
    with torch.no_grad():
        inputs.packed[(memory_segments == 0) | (memory_segments > 2)] = torch.nan
    computed = _computed(inputs._replace(rows=inputs.rows._replace(memory_segments=memory_segments)), case)
    assert all(each.isfinite().all() for each in computed)


def test_tiles_are_found_by_the_lowest_and_highest_segment_of_each_block() -> None:
    row = [1] * 64 + [2] * 70 + [3] * 58 + [4] * 4 + [0] * 10
    segments = torch.tensor([row, [0] * len(row)], dtype=torch.int32)
    tiles = segment_tiles(segments, segments, range(-1, 2))
    assert tiles.of_queries.tolist() == [[[0, 64], [64, 160], [64, 192], [192, 224]], [[0, 0]] * 4]
    assert tiles.of_keys.tolist() == tiles.of_queries.tolist()
    found = [each[:n].tolist() for each, n in zip(tiles.near, tiles.num_near, strict=True)]
    assert found == [[2], [0, 1, 2, 3], [1]]


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the GPU takes more cases")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_without_kernels(case: Case) -> None:
    _check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter computes bf16 wrongly, and takes too long")
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES)
def test_output_and_gradients_are_those_without_kernels_on_a_gpu(case: Case) -> None:
    _check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="records CUDA graphs")
@pytest.mark.parametrize("name", ["encoder", "decoder", "cross"])
def test_a_recorded_pass_follows_the_segments_and_keys_of_each_batch(name: str) -> None:
    """All that varies is in tensors, so that one CUDA graph serves all batches."""
    case = GPU_CASES[f"{name} of packed rows, bfloat16"]
    recorded = torch.compile(_mixed, fullgraph=True, mode="reduce-overhead")
    inputs = Inputs.of(case)
    for number in range(5):
        rows = AttentionRows(*(None if each is None else each.roll(number, 0) for each in inputs.rows))
        slope = inputs.slope * (rows.segments > 0)[:, :, None, None]
        given = inputs._replace(rows=rows, slope=slope)
        torch.compiler.cudagraph_mark_step_begin()
        assert all(map(torch.equal, _computed(given, case, recorded), _computed(given, case))), number
