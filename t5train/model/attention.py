"""T5's attention: unscaled dot products, and a learned bias by bucketed distance (Raffel et al. 2020, section 2.1)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.model_shape import RELATIVE_BUCKETS, RELATIVE_MAX_DISTANCE, T5Shape


class Attention(nn.Module):
    """Multi-head attention; the first layer of a stack also owns the position bias that all its layers share."""

    def __init__(self, shape: T5Shape, position_bias: "PositionBias | None" = None) -> None:
        super().__init__()
        self.num_heads, self.d_kv, self.dropout_rate = shape.num_heads, shape.d_kv, shape.dropout_rate
        self.q = nn.Linear(shape.d_model, shape.inner, bias=False)
        self.k = nn.Linear(shape.d_model, shape.inner, bias=False)
        self.v = nn.Linear(shape.d_model, shape.inner, bias=False)
        self.o = nn.Linear(shape.inner, shape.d_model, bias=False)
        if position_bias is not None:
            self.relative_attention_bias = position_bias

    def forward(self, hidden: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """``hidden`` [b, q, d_model] attends to ``memory`` [b, k, d_model]; a ``bias`` [1, heads, q, k] is added."""
        # view_as makes one graph node for all uses below, so that their gradients are summed there, with or without a
        # hook before it (ZeRO 3 adds one). Every layout then computes the same bits.
        hidden, memory = hidden.view_as(hidden), memory.view_as(memory)
        query, key, value = self._heads(self.q(hidden)), self._heads(self.k(memory)), self._heads(self.v(memory))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=self.dropout_rate if self.training else 0.0, scale=1.0
        )
        output: Tensor = self.o(mixed.transpose(1, 2).reshape(*hidden.shape[:-1], -1))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], self.num_heads, self.d_kv).transpose(1, 2)


class PositionBias(nn.Module):
    """A learned bias of each head for the distance between two positions. With ``causal``, the future is masked."""

    def __init__(self, shape: T5Shape, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(RELATIVE_BUCKETS, shape.num_heads))
        self.causal = causal

    def forward(self, length: int) -> Tensor:
        """Return the bias [1, heads, length, length] of pairs of positions; the lowest finite number where masked."""
        positions = torch.arange(length, device=self.weight.device)
        distance = positions[None, :] - positions[:, None]
        bias = functional.embedding(_bucket(distance, bidirectional=not self.causal), self.weight)
        bias = bias.permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            bias = torch.where(distance <= 0, bias, torch.finfo(bias.dtype).min)
        return bias.contiguous()


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
