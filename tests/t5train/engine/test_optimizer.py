"""AdamW relative to each tensor's RMS, on tensors that are cut into partitions."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from t5train.engine.optimizer import MINIMAL_RMS, AdamWRms, Partition, Segment
from t5train.engine.partitions import _cut_joined, _cut_one_by_one
from t5train.model.model_shape import resolve
from t5train.model.parameters import ParameterSlot, is_decayed, parameter_shapes
from t5train.spec.recipes import recipe

STEPS = 3


def _optimizer(tensors: list[Tensor], relative: bool = True, weight_decay: float = 0.0) -> AdamWRms:
    optimizer = AdamWRms(tensors, betas=(0.9, 0.99), epsilon=1e-8, weight_decay=weight_decay, relative=relative)
    optimizer.param_groups[0]["lr"] = 0.1
    return optimizer


def _whole(tensors: list[Tensor]) -> dict[Tensor, Partition]:
    return {tensor: Partition([Segment(0, tensor.numel(), 0, tensor.numel(), 0)], 1) for tensor in tensors}


def _gradients(sizes: list[int]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(size, generator=generator) for size in sizes] for _ in range(STEPS)]


def test_without_rms_scaling_the_optimizer_equals_torchs_adamw() -> None:
    ours, theirs = torch.linspace(-1, 1, 50).view(5, 10), torch.linspace(-1, 1, 50).view(5, 10)
    optimizer = _optimizer([ours], relative=False, weight_decay=0.1)
    optimizer.attach(_whole([ours]), None)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    for (gradient,) in _gradients([50]):
        ours.grad = theirs.grad = gradient.view(5, 10)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("relative", [True, False])
def test_weight_decay_shrinks_only_the_parts_that_are_decayed(relative: bool) -> None:
    flat, plain = torch.full((6,), 2.0), torch.full((6,), 2.0)
    segments = [Segment(0, 2, 0, 2, 0, is_decayed=True), Segment(2, 5, 1, 3, 0, is_decayed=False)]  # and padding
    for tensor, weight_decay in ((flat, 0.5), (plain, 0.0)):
        optimizer = _optimizer([tensor], relative, weight_decay)
        optimizer.attach({tensor: Partition(segments, 2)}, None)
        tensor.grad = torch.zeros(6)
        optimizer.step()
    torch.testing.assert_close(flat[:2], plain[:2] * (1 - 0.1 * 0.5))
    assert torch.equal(flat[2:], plain[2:])


def test_of_parameters_that_are_updated_whole_weight_decay_exempts_vectors() -> None:
    matrix, vector = torch.full((2, 3), 2.0), torch.full((6,), 2.0)
    optimizer = _optimizer([matrix, vector], weight_decay=0.5)
    optimizer.attach(_whole([matrix, vector]), None)
    matrix.grad, vector.grad = torch.zeros(2, 3), torch.zeros(6)
    optimizer.step()
    torch.testing.assert_close(matrix, torch.full((2, 3), 1.9))
    assert torch.equal(vector, torch.full((6,), 2.0))


def test_norms_and_position_biases_are_the_parameters_that_are_not_decayed() -> None:
    shape = resolve(recipe("smoke").model, 128)
    exempt = {name for name, its in parameter_shapes(shape).items() if not is_decayed(name, its)}
    assert len(exempt) == 2 * (shape.num_layers + 1) + 3 * shape.num_decoder_layers + 2
    assert all(name.endswith(("layer_norm.weight", "relative_attention_bias.weight")) for name in exempt)


def test_a_step_is_proportional_to_the_rms_of_its_tensor_but_of_zeros_to_a_minimum() -> None:
    tensors = [torch.full((64,), start) for start in (0.01, 10.0, 0.0)]
    optimizer = _optimizer(tensors)
    optimizer.attach(_whole(tensors), None)
    for tensor in tensors:
        tensor.grad = torch.ones(64)
    optimizer.step()
    for tensor, expected in zip(tensors, (0.009, 9.0, -0.1 * MINIMAL_RMS), strict=True):
        torch.testing.assert_close(tensor, torch.full((64,), expected))


def test_a_step_before_attach_and_one_without_a_gradient_change_nothing() -> None:
    tensor = torch.ones(4)
    optimizer = _optimizer([tensor])
    tensor.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[tensor]["step"] == 0
    tensor.grad = None
    optimizer.attach(_whole([tensor]), None)
    optimizer.step()
    assert torch.equal(tensor, torch.ones(4))
    assert pytest.approx(0.1) == optimizer.param_groups[0]["lr"]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    num_ranks=st.integers(1, 4),
    alignment=st.integers(0, 3),
)
def test_updates_do_not_depend_on_how_tensors_are_partitioned_over_ranks(
    sizes: list[int], num_ranks: int, alignment: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn(size, generator=generator) * 10.0**index for index, size in enumerate(sizes)]
    slots, offset = [], 0
    for index, size in enumerate(sizes):
        slots.append(ParameterSlot(name=str(index), shape=(size,), offset=offset, numel=size))
        offset += size + alignment
    numel = -(-offset // num_ranks)
    flat = torch.zeros(numel * num_ranks)
    gradients = [torch.zeros_like(flat) for _ in range(STEPS)]
    for index, slot in enumerate(slots):
        span = slice(slot.offset, slot.offset + slot.numel)
        flat[span] = whole[index]
        for step, found in enumerate(_gradients(sizes)):
            gradients[step][span] = found[index]
    parts = [part.clone() for part in flat.split(numel)]

    _step_whole(whole, _gradients(sizes))
    _step_parts(parts, slots, gradients)

    updated = torch.cat(parts)
    for index, slot in enumerate(slots):
        torch.testing.assert_close(updated[slot.offset : slot.offset + slot.numel], whole[index], rtol=1e-5, atol=1e-7)


def _step_whole(tensors: list[Tensor], gradients: list[list[Tensor]]) -> None:
    optimizer = _optimizer(tensors)
    optimizer.attach(_whole(tensors), None)
    for found in gradients:
        for tensor, gradient in zip(tensors, found, strict=True):
            tensor.grad = gradient
        optimizer.step()


def _step_parts(parts: list[Tensor], slots: list[ParameterSlot], gradients: list[Tensor]) -> None:
    """Step every rank's optimizer in turn. The sums that ranks exchange are computed beforehand, from all parts."""
    numel = parts[0].numel()
    layouts = [Partition(_cut_joined(slots, rank, numel), len(slots)) for rank in range(len(parts))]
    optimizers = [_optimizer([part]) for part in parts]
    for gradient in gradients:
        sums = torch.zeros(len(slots), dtype=torch.float64)
        for part, layout in zip(parts, layouts, strict=True):
            for start, stop, owner, *_ in layout.segments:
                sums[owner] += part[start:stop].double().square().sum()
        for rank, optimizer in enumerate(optimizers):
            optimizer.attach({parts[rank]: layouts[rank]}, partial(_replace, by=sums))
            parts[rank].grad = gradient[rank * numel : (rank + 1) * numel]
        for optimizer in optimizers:
            optimizer.step()


def _replace(mine: Tensor, sharers: None, by: Tensor) -> None:
    mine.copy_(by)


def _slots(*sizes_and_offsets: tuple[int, int]) -> list[ParameterSlot]:
    return [ParameterSlot(name="a", shape=(n,), offset=at, numel=n) for n, at in sizes_and_offsets]


def test_segments_cover_a_partition_and_individually_partitioned_parameters_without_their_padding() -> None:
    joined = _slots((5, 0), (4, 6))
    assert _cut_joined(joined, 0, 6) == [Segment(0, 5, 0, 5, 0)]
    assert _cut_joined(joined, 1, 6) == [Segment(0, 4, 1, 4, 0)]
    assert _cut_joined(joined, 1, 4) == [Segment(0, 1, 0, 5, 4), Segment(2, 4, 1, 4, 0)]
    apart = _slots((5, 0), (1, 2), (6, 3))
    assert _cut_one_by_one(apart, 0, 3) == [Segment(0, 2, 0, 5, 0), Segment(2, 3, 1, 1, 0), Segment(3, 5, 2, 6, 0)]
    assert _cut_one_by_one(apart, 2, 3) == [Segment(0, 1, 0, 5, 4), Segment(3, 5, 2, 6, 4)]
