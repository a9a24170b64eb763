"""Brings tokens to their experts and back. Tokens are sorted by expert, so a product takes each expert's tokens only.

Besides the router's own numbers, only the masks that count the choices are as large as tokens times experts. Those of
DeepSpeed are as large as that times an expert's capacity.

- In rows: the tokens of all experts lie one behind the other, and one grouped product multiplies each by the weights of
  its expert. All experts must be on this rank.
- In slots: every expert has as many places as it takes tokens at most. Ranks that divide the experts can then exchange
  places without knowing how many are occupied, and a batched product multiplies them.

Neither waits for the accelerator. Every sum has a fixed order, so equal inputs give equal bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional


class Experts(NamedTuple):
    """The experts of a layer that are on this rank."""

    first: Tensor
    """[experts here, d_ff, d_model]"""
    second: Tensor
    """[experts here, d_model, d_ff]"""
    dropout: nn.Module
    group: ProcessGroup | None
    """The ranks that divide the layer's experts, each with as many; None if all are here."""


class Route(NamedTuple):
    """How tokens are sorted by expert, in a random order within each expert, first choices before second ones.

    A choice is a token and one of its ``top_k`` experts; its number is token times top_k plus that of the expert.
    """

    order: Tensor
    """int64 [rows]: the choice that each row belongs to."""
    row: Tensor
    """int64 [tokens, top_k]: the row of each choice."""
    place: Tensor
    """int64 [tokens, top_k]: how many rows of the same expert come before."""
    chosen: Tensor
    """int64 [tokens, top_k]: the expert of each choice."""
    counts: Tensor
    """int64 [experts]: how often each expert was chosen."""

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> "Route":
        """Sort the choices [tokens, top_k]."""
        counts = (chosen.flatten()[:, None] == torch.arange(num_experts, device=chosen.device)).sum(0)
        top_k = chosen.shape[1]
        bits = 31 - num_experts.bit_length() - (top_k - 1).bit_length()
        rank = torch.randint(0, 1 << bits, chosen.shape, dtype=torch.int32, device=chosen.device)
        rank += torch.arange(top_k, dtype=torch.int32, device=chosen.device) << bits
        keys = (chosen.int() << (31 - num_experts.bit_length())) + rank
        order = keys.flatten().sort(stable=True).indices
        row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view_as(chosen)
        return cls(order, row, row - (counts.cumsum(0) - counts)[chosen], chosen, counts)


def apply_in_rows(experts: Experts, tokens: Tensor, route: Route) -> Tensor:
    """Return [tokens, top_k, d_model]: what each choice's expert makes of its token [tokens, d_model]."""
    ends = route.counts.cumsum(0).int()
    rows = _take(tokens, route.order // route.chosen.shape[1], route.row)
    inner = functional.relu(functional.grouped_mm(rows, experts.first.transpose(1, 2), offs=ends))
    rows = functional.grouped_mm(experts.dropout(inner), experts.second.transpose(1, 2), offs=ends)
    return _take(rows, route.row, route.order)


def apply_in_slots(experts: Experts, tokens: Tensor, route: Route, capacity: int) -> Tensor:
    """Return the same as ``apply_in_rows``, but of an expert's choices only the first ``capacity``, then any numbers.

    A collective of the ranks that divide the experts.
    """
    places = torch.arange(capacity, device=tokens.device)
    is_filled = (places < route.counts[:, None]).flatten()
    row = (route.counts.cumsum(0) - route.counts)[:, None] + places
    choice = route.order[row.clamp(max=len(route.order) - 1).flatten()]  # in slots that are not filled, any other one
    slot = route.chosen * capacity + route.place.clamp(max=capacity - 1)
    slots = _take(tokens, choice // route.chosen.shape[1], slot, route.place < capacity)
    received = _exchanged(slots, experts.group)
    mine = received.view(-1, len(experts.first), capacity, tokens.shape[1]).transpose(0, 1)
    inner = functional.relu(torch.bmm(mine.flatten(1, 2), experts.first.transpose(1, 2)))
    made = torch.bmm(experts.dropout(inner), experts.second.transpose(1, 2))
    sent = made.view_as(mine).transpose(0, 1).reshape(slots.shape)
    return _take(_exchanged(sent, experts.group), slot, choice, is_filled)


def _exchanged(slots: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send each rank an even share of the rows, in the order of the ranks, and return what they sent."""
    if group is None:
        return slots
    shares = [len(slots) // distributed.get_world_size(group)] * distributed.get_world_size(group)
    received: Tensor = all_to_all_single_autograd(slots, shares, shares, group)
    return received


def _take(source: Tensor, index: Tensor, inverse: Tensor, is_used: Tensor | None = None) -> Tensor:
    """Return ``source[index]``. Its gradient is taken in the same way: no additions in an order that may vary.

    ``inverse`` holds, for each row of ``source``, the place or places in the flattened index that name it. Where
    ``is_used`` is false, no place does, and there is no gradient.
    """
    apply: Callable[..., Tensor] = _Take.apply
    return apply(source, index, inverse, is_used)


class _Take(torch.autograd.Function):
    """See ``_take``."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor, is_used: Tensor | None) -> Tensor:
        """Return [*index, width]."""
        ctx.save_for_backward(inverse, is_used)
        return source[index]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of ``source``."""
        inverse, is_used = ctx.saved_tensors
        taken = slopes[0].flatten(0, -2)[inverse]
        if is_used is not None:
            taken = taken.where(is_used.unsqueeze(-1), 0)
        return (taken if inverse.dim() == 1 else taken.sum(1)), None, None, None
