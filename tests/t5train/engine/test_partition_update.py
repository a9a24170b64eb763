"""The fused update against AdamWRms: on a GPU where there is one, otherwise in Triton's interpreter."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from t5train.engine.optimizer import AdamWRms, Partition, Segment
from tests.support.needed_triton import require_triton

HAS_GPU = torch.cuda.is_available()
require_triton()

# After require_triton, because the module imports Triton.
from t5train.engine.partition_update import (  # noqa: E402 - see above
    CHUNK_ELEMENTS,
    Chunks,
    Gradients,
    Settings,
    squares,
    update,
)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BETAS, EPSILON, STEPS = (0.9, 0.999), 1e-8, 3
BOUND = 1e-6
"""Largest distance of a parameter's weights or moments from those of AdamWRms, in the Euclidean norm.

It is relative to the largest norm that they had from the start on. Terms of opposite sign may cancel: the rounding
errors of a parameter of one element are then large next to what is left of it, and small next to what it was.
"""
CUT_BOUND = 1e-7
"""The same between two ways to cut parameters over ranks, which round the sums of squares differently, in fp64.

It is relative to the norm at the end.
"""


class Held(NamedTuple):
    """Weights, moments and rounded weights of all ranks, one behind the other."""

    weights: Tensor
    first: Tensor
    second: Tensor
    rounded: Tensor


def _is_decayed(owner: int) -> bool:
    """Every third parameter is not, like norms."""
    return owner % 3 != 1


def _cut(sizes: list[int], ranks: int, multiple: int) -> tuple[list[Partition], int]:
    """What each rank holds of a flat buffer, as ZeRO 1 and 2 cut it, and how many elements that is."""
    piece, partitions = -(-sum(sizes) // (ranks * multiple)) * multiple, []
    for begin in range(0, piece * ranks, piece):
        found, offset = [], 0
        for owner, size in enumerate(sizes):
            start, stop = max(offset, begin), min(offset + size, begin + piece)
            if start < stop:
                found.append(Segment(start - begin, stop - begin, owner, size, start - offset, _is_decayed(owner)))
            offset += size
        partitions.append(Partition(found, len(sizes)))
    return partitions, piece


def _weights(sizes: list[int]) -> Tensor:
    """Parameters whose RMS differ; some lie below the smallest one that counts, or are zero."""
    generator = torch.Generator().manual_seed(1)
    scales = (0.0001, 0.05, 1.0, 0.0)
    return torch.cat([torch.randn(n, generator=generator) * scales[i % 4] for i, n in enumerate(sizes)]).to(DEVICE)


def _gradients(numel: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(numel, generator=generator) * 0.01).to(DEVICE, dtype) for _ in range(STEPS)]


def _settings(step: int, clip: float = 1.0, weight_decay: float = 0.0, relative: bool = True) -> Settings:
    return Settings(0.02 / step, step, BETAS, EPSILON, weight_decay, clip, relative)


def _updated(
    sizes: list[int], gradients: list[Tensor], steps: list[Settings], ranks: int = 1, multiple: int = 2
) -> Held:
    """Update by the kernels, on ``ranks`` simulated ranks."""
    partitions, piece = _cut(sizes, ranks, multiple)
    weights = torch.zeros(piece * ranks, device=DEVICE)
    weights[: sum(sizes)] = _weights(sizes)
    held = Held(weights, torch.zeros_like(weights), torch.zeros_like(weights), weights.bfloat16())
    for gradient, step in zip(gradients, steps, strict=True):
        _step(held, partitions, gradient, step)
    return Held(*(each[: sum(sizes)] for each in held))


def _step(held: Held, partitions: list[Partition], gradient: Tensor, step: Settings) -> Tensor:
    """Take one step on every rank; returns the norm."""
    piece = held.weights.numel() // len(partitions)
    padded = torch.zeros(held.weights.numel(), dtype=gradient.dtype, device=DEVICE)
    padded[: gradient.numel()] = gradient
    mine = [Held(*(each[rank * piece :][:piece] for each in held)) for rank in range(len(partitions))]
    chunks = [Chunks.of(partition, DEVICE) for partition in partitions]
    found = [
        Gradients.of(each, partition.parts_of(padded[rank * piece :][:piece]))
        for rank, (each, partition) in enumerate(zip(chunks, partitions, strict=True))
    ]
    sums = [squares(each, part.weights, its) for each, part, its in zip(chunks, mine, found, strict=True)]
    total = torch.stack(sums).sum(0)
    norm = total[1].sum().sqrt()
    for each, part, its in zip(chunks, mine, found, strict=True):
        update(each, part[:3], its, part.rounded, total[0], norm, step)
    return norm


def _expected(sizes: list[int], gradients: list[Tensor], steps: list[Settings]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Weights and moments after each step of DeepSpeed's clipping and AdamWRms; first those at the start."""
    flat, last = torch.nn.Parameter(_weights(sizes)), steps[-1]
    optimizer = AdamWRms([flat], last.betas, last.epsilon, last.weight_decay, last.relative)
    optimizer.attach({flat: _cut(sizes, 1, 1)[0][0]}, None)
    states = [(flat.detach().clone(), torch.zeros_like(flat), torch.zeros_like(flat))]
    for gradient, step in zip(gradients, steps, strict=True):
        flat.grad = gradient.float()
        if step.clip:
            flat.grad /= ((flat.grad.double().norm().float() + 1e-6) / step.clip).clamp(min=1.0)
        optimizer.param_groups[0]["lr"] = step.rate
        optimizer.step()
        state = optimizer.state_of(flat)
        states.append((flat.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
    return states


def _norms(sizes: list[int], flat: Tensor) -> Tensor:
    return torch.stack([parameter.norm() for parameter in flat.double().split(sizes)])


def _distance(sizes: list[int], found: Tensor, *wanted: Tensor) -> float:
    """Largest distance of any parameter from the last one wanted, relative to the largest one."""
    scale = torch.stack([_norms(sizes, each) for each in wanted]).amax(0)
    return float((_norms(sizes, found.double() - wanted[-1].double()) / scale.clamp(min=1e-30)).max())


SIZES = st.lists(st.integers(1, 700) | st.sampled_from([CHUNK_ELEMENTS, CHUNK_ELEMENTS + 24]), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    sizes=SIZES,
    dtype=st.sampled_from([torch.bfloat16, torch.float32] if HAS_GPU else [torch.float32]),
    clip=st.sampled_from([0.0, 1.0, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    relative=st.booleans(),
)
def test_an_update_equals_that_of_adamw_rms(
    sizes: list[int], dtype: torch.dtype, clip: float, weight_decay: float, relative: bool
) -> None:
    gradients = _gradients(sum(sizes), dtype)
    steps = [_settings(step + 1, clip, weight_decay, relative) for step in range(STEPS)]
    updated = _updated(sizes, gradients, steps)
    for found, wanted in zip(updated[:3], zip(*_expected(sizes, gradients, steps), strict=True), strict=True):
        assert _distance(sizes, found, *wanted) <= BOUND


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(sizes=SIZES, ranks=st.integers(2, 4), multiple=st.sampled_from([1, 2, 16]))
def test_an_update_does_not_depend_on_how_parameters_are_cut_over_ranks(
    sizes: list[int], ranks: int, multiple: int
) -> None:
    gradients, steps = _gradients(sum(sizes), torch.float32), [_settings(step + 1) for step in range(STEPS)]
    whole, pieces = (_updated(sizes, gradients, steps, *cut) for cut in ((1, 2), (ranks, multiple)))
    for found, wanted in zip(pieces[:3], whole[:3], strict=True):
        assert _distance(sizes, found, wanted) <= CUT_BOUND


LAYOUT = [3 * CHUNK_ELEMENTS + 40, 96, 7, 513, 12]


def test_two_runs_give_the_same_bits() -> None:
    gradients, steps = _gradients(sum(LAYOUT), torch.float32), [_settings(step + 1) for step in range(STEPS)]
    assert all(map(torch.equal, _updated(LAYOUT, gradients, steps), _updated(LAYOUT, gradients, steps)))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float) -> None:
    partitions, _ = _cut(LAYOUT, 1, 1)
    weights = _weights(LAYOUT)
    held = Held(weights, torch.rand_like(weights), torch.rand_like(weights), weights.bfloat16())
    before = [each.clone() for each in held]
    gradient = _gradients(sum(LAYOUT), torch.float32)[0]
    gradient[sum(LAYOUT) // 2] = poison
    norm = _step(held, partitions, gradient, _settings(1))
    assert not torch.isfinite(norm)
    assert all(map(torch.equal, held, before))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter truncates where a GPU rounds")
def test_the_models_weights_are_the_rounded_ones() -> None:
    gradients, steps = _gradients(sum(LAYOUT), torch.bfloat16), [_settings(step + 1) for step in range(STEPS)]
    held = _updated(LAYOUT, gradients, steps)
    assert torch.equal(held.rounded, held.weights.bfloat16())


def test_gradients_that_do_not_fit_the_segments_are_refused() -> None:
    chunks = Chunks.of(_cut([8, 8], 1, 1)[0][0], DEVICE)
    with pytest.raises(ValueError, match="as long as the segments"):
        Gradients.of(chunks, [torch.zeros(8, device=DEVICE), torch.zeros(9, device=DEVICE)])


def test_a_partition_without_parameters_is_updated_with_the_others() -> None:
    """The last rank of a padded group may hold nothing; it still joins the sums over ranks."""
    partition = Partition([], 3)
    chunks, flat = Chunks.of(partition, DEVICE), torch.ones(8, device=DEVICE)
    held = Gradients.of(chunks, [])
    sums = squares(chunks, flat, held)
    assert torch.equal(sums, torch.zeros_like(sums))
    state = (flat, torch.ones_like(flat), torch.ones_like(flat))
    update(chunks, state, held, flat.bfloat16(), sums[0], torch.ones((), device=DEVICE), _settings(1))
    assert all(torch.equal(each, torch.ones_like(each)) for each in state)
