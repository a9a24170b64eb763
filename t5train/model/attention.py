"""T5's attention: unscaled dot products, and a learned bias by bucketed distance (Raffel et al. 2020, section 2.1)."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.counted_dropout import branch, dropped
from t5train.model.lora import joint_projection, projected
from t5train.model.model_shape import RELATIVE_BUCKETS, RELATIVE_MAX_DISTANCE, T5Shape

KERNEL_HEAD_WIDTHS = (32, 64, 128)
"""The values of d_kv that the kernels of ``biased_attention`` support."""


class AttentionRows(NamedTuple):
    """What attention must know of tokens [b, q] and of its memory [b, k] in rows of pairs: segments, keys of dropout.

    Segments are int32, 0 for padding. Keys are int64; None without dropout.
    """

    segments: Tensor
    memory_segments: Tensor
    keys: Tensor | None
    memory_keys: Tensor | None

    def of_itself(self) -> "AttentionRows":
        """Return those of tokens that attend to each other."""
        return AttentionRows(self.segments, self.segments, self.keys, self.keys)

    def below(self, number: int) -> "AttentionRows":
        """Return those of a place below, by its number there: keys branch there; the memory's are the same."""
        return self._replace(keys=branch(self.keys, number))


class Kernel(Protocol):
    """Takes queries, packed keys and values, a table of the bias, and whether to mask the future.

    See ``t5train.model.kernels.biased_attention``.
    """

    def __call__(
        self,
        query: Tensor | None,
        packed: Tensor,
        table: Tensor | None,
        causal: bool,
        rows: AttentionRows | None,
        dropout_rate: float,
    ) -> Tensor:
        """Return what each head attends to, [b, q, heads, d_kv]."""


class Attention(nn.Module):
    """Multi-head attention; the first layer of a stack also owns the position bias that all its layers share.

    With a ``kernel``, training calls it instead of torch's attention.
    """

    kernel: Kernel | None = None

    def __init__(self, shape: T5Shape, position_bias: "PositionBias | None" = None, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.num_heads, self.d_kv, self.dropout_rate = shape.num_heads, shape.d_kv, shape.dropout_rate
        self.q = nn.Linear(shape.d_model, shape.inner, bias=False)
        self.k = nn.Linear(shape.d_model, shape.inner, bias=False)
        self.v = nn.Linear(shape.d_model, shape.inner, bias=False)
        self.o = nn.Linear(shape.inner, shape.d_model, bias=False)
        if position_bias is not None:
            self.relative_attention_bias = position_bias

    def forward(self, hidden: Tensor, memory: Tensor, bias: Tensor | None, rows: AttentionRows | None = None) -> Tensor:
        """``hidden`` [b, q, d_model] attends to ``memory`` [b, k, d_model]; a ``bias`` of PositionBias is added.

        In training, keys of ``rows`` decide what dropout drops, of weights and before adapters, if there are any.
        Without a kernel, the bias masks other segments.
        """
        keys, memory_keys = (None, None) if rows is None else (rows.keys, rows.memory_keys)
        if self.kernel is not None and self.training:
            packed = self._packed(hidden, memory, keys, memory_keys)
            mixed = self.kernel(*packed, bias, self.causal, rows, self.dropout_rate)
        else:
            mixed = self._mix(hidden, memory, bias, keys, memory_keys).transpose(1, 2)
        return projected(self.o, mixed.reshape(*hidden.shape[:-1], -1), keys)

    def _mix(
        self, hidden: Tensor, memory: Tensor, bias: Tensor | None, keys: Tensor | None, memory_keys: Tensor | None
    ) -> Tensor:
        """Return what each head attends to, [b, heads, q, d_kv]."""
        # view_as makes one graph node for all uses below, so that their gradients are summed there, with or without a
        # hook before it (ZeRO 3 adds one). Every layout then computes the same bits.
        hidden, memory = hidden.view_as(hidden), memory.view_as(memory)
        query = self._heads(projected(self.q, hidden, keys))
        key, value = (self._heads(projected(layer, memory, memory_keys)) for layer in (self.k, self.v))
        if self.training and keys is not None and memory_keys is not None:
            scores = query @ key.transpose(-1, -2)
            weights = functional.softmax((scores if bias is None else scores + bias).float(), dim=-1).to(value.dtype)
            of_heads = branch(keys.unsqueeze(1), torch.arange(self.num_heads, device=keys.device).unsqueeze(1))
            return dropped(weights, self.dropout_rate, of_heads, memory_keys.int()[:, None, None]) @ value
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=self.dropout_rate if self.training else 0.0, scale=1.0
        )

    def _packed(
        self, hidden: Tensor, memory: Tensor, keys: Tensor | None, memory_keys: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return queries, keys and values as the kernel takes them."""
        if hidden is memory:
            joint = joint_projection(hidden, (self.q, self.k, self.v), (keys, memory_keys, memory_keys))
            return None, joint.view(*joint.shape[:-1], 3, self.num_heads, self.d_kv)
        query = projected(self.q, hidden, keys)
        joint = joint_projection(memory, (self.k, self.v), (memory_keys, memory_keys))
        heads = self.num_heads, self.d_kv
        return query.view(*query.shape[:-1], *heads), joint.view(*joint.shape[:-1], 2, *heads)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], self.num_heads, self.d_kv).transpose(1, 2)


class PositionBias(nn.Module):
    """A learned bias of each head for the distance between two positions. With ``causal``, the future is masked.

    With ``table_of``, training gets the bias by distance, as the kernel of Attention takes it, instead of by pair.
    """

    table_of: Callable[[Tensor], Tensor] | None = None

    def __init__(self, shape: T5Shape, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(RELATIVE_BUCKETS, shape.num_heads))
        self.causal = causal

    @property
    def by_distance(self) -> bool:
        """Whether ``forward`` returns the table of a kernel, which masks other segments itself."""
        return self.table_of is not None and self.training

    def forward(self, length: int, segments: Tensor | None = None) -> Tensor:
        """Return the bias [1, heads, length, length] of pairs of positions; the lowest finite number where masked.

        With ``segments`` [b, length], it is [b, heads, length, length], and other segments are masked, too. For a
        kernel, return its table of the bias instead; the kernel masks the future and other segments itself.
        """
        if self.by_distance and self.table_of is not None:
            return self.table_of(self._by_distance())
        positions = torch.arange(length, device=self.weight.device)
        distance = positions[None, :] - positions[:, None]
        bias = functional.embedding(_bucket(distance, bidirectional=not self.causal), self.weight)
        bias = bias.permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            bias = torch.where(distance <= 0, bias, torch.finfo(bias.dtype).min)
        if segments is not None:
            bias = torch.where(sees(segments, segments), bias, torch.finfo(bias.dtype).min)
        return bias.contiguous()

    def _by_distance(self) -> Tensor:
        """Return the bias [heads, 257] of the distances from -128 to 128; farther ones have the same."""
        distance = torch.arange(-RELATIVE_MAX_DISTANCE, RELATIVE_MAX_DISTANCE + 1, device=self.weight.device)
        return functional.embedding(_bucket(distance, bidirectional=not self.causal), self.weight).T


def sees(segments: Tensor, of_memory: Tensor) -> Tensor:
    """Return which tokens of ``of_memory`` [b, k] those of ``segments`` [b, q] attend to, bool [b, 1, q, k].

    Those of their own segment. Padding, segment 0, attends to everything: nothing depends on it, and attention to
    nothing would not be a number.
    """
    queries, keys = segments[:, None, :, None], of_memory[:, None, None, :]
    return (queries == keys) | (queries == 0)


def _bucket(distance: Tensor, bidirectional: bool) -> Tensor:
    """Return the bucket of a distance (key position minus query position).

    Buckets are exact for short distances, logarithmic up to 128, then constant.
    """
    buckets = RELATIVE_BUCKETS
    sign = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        sign = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    ratio = torch.log(distance.float() / exact) / math.log(RELATIVE_MAX_DISTANCE / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return sign + torch.where(distance < exact, distance, far)
