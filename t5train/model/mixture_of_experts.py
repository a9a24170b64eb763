"""Experts instead of a feed-forward layer: DeepSpeed's MoE layer, as in Switch Transformers (Fedus et al. 2022).

With ``sorts_tokens``, training sorts the tokens by expert, so that one grouped product multiplies each token by the
weights of its expert. DeepSpeed's layer computes the same with masks of all tokens and experts and a product for each
expert, in many more kernels. Evaluation always uses DeepSpeed's layer.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor
from torch.nn import functional

from t5train.model.feed_forward import FeedForward
from t5train.model.model_shape import T5Shape


class SparseFeedForward(MoE):  # type: ignore[misc]  # DeepSpeed has no types
    """ReLU experts; an fp32 router chooses one or two of them for each token.

    In training, an expert takes up to ``capacity_factor`` times its even share of a micro-batch. If more tokens are
    routed to it, random ones are dropped. Evaluation drops none, so that its result depends only on the tokens.

    ``router_loss`` is the weighted loss of the last forward pass. ``tokens`` [num_experts] counts the tokens routed to
    each expert since the last ``reset``, and ``overflow`` those above capacity.
    """

    router_loss: Tensor
    tokens: Tensor
    overflow: Tensor
    sorts_tokens = False

    def __init__(self, shape: T5Shape, expert_parallel_size: int) -> None:
        settings = shape.moe
        super().__init__(
            shape.d_model,
            FeedForward(shape),
            num_experts=settings.num_experts,
            ep_size=expert_parallel_size,
            k=settings.top_k,
            capacity_factor=settings.capacity_factor,
            min_capacity=0,
        )
        self.settings = settings
        # Buffers, because a CUDA graph adds to them in place.
        self.register_buffer("tokens", torch.zeros(settings.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("overflow", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, n, d_model] to the same shape."""
        if self.training and self.sorts_tokens:
            return self._train(hidden)
        gate = self.deepspeed_moe.gate
        gate.drop_tokens = gate.use_rts = gate.top2_2nd_expert_sampling = self.training
        output: Tensor
        output, balance_loss, counts = super().forward(hidden)
        self.router_loss = self.settings.aux_loss * balance_loss + self.settings.z_loss * self._z_loss(hidden)
        self._count(counts)
        return output

    def _train(self, hidden: Tensor) -> Tensor:
        """Compute the layer's output and router loss for training, without waiting for the accelerator."""
        tokens = hidden.view_as(hidden).flatten(0, -2)  # see Attention
        logits = functional.linear(tokens.float(), self.deepspeed_moe.gate.wg.weight.float())
        probabilities = functional.softmax(logits, dim=1)
        chosen = self._choose(logits, probabilities)
        counts = (chosen.flatten()[:, None] == torch.arange(self.num_experts, device=chosen.device)).sum(0)
        route = _Route.of(chosen, counts)
        kept = route.place < math.ceil(len(chosen) / self.num_experts * self.settings.capacity_factor * chosen.shape[1])
        weights = probabilities.gather(1, chosen) * kept
        if chosen.shape[1] > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        rows = _take(tokens, route.token, route.row)
        rows = self._apply_experts(rows, counts.cumsum(0).int())
        taken = _take(rows, route.row, route.order)
        output: Tensor = (taken * weights.unsqueeze(2).to(taken.dtype)).sum(1)
        balance = self._balance_loss(probabilities, chosen)
        z_loss = logits.logsumexp(-1).square().mean()
        self.router_loss = self.settings.aux_loss * balance + self.settings.z_loss * z_loss
        self._count(counts)
        return output.view_as(hidden)

    def _choose(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Return the experts of each token, int64 [tokens, top_k], the likeliest first; a second one is sampled."""
        first = probabilities.argmax(1, keepdim=True)
        if self.settings.top_k == 1:
            return first
        noise = -torch.empty_like(logits).exponential_().log()  # Gumbel's distribution
        return torch.cat([first, (logits.detach() + noise).scatter(1, first, -math.inf).argmax(1, keepdim=True)], 1)

    def _balance_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Return the product of each expert's mean probability and share of first choices, summed and scaled."""
        experts = torch.arange(self.num_experts, device=chosen.device)
        shares = (chosen[:, :1] == experts).float().mean(0)
        balance: Tensor = (probabilities.mean(0) * shares).sum() * self.num_experts
        return balance

    def _apply_experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply to [rows, d_model] the expert of each row; those of expert i end before row ``ends[i]``."""
        experts = [cast(FeedForward, each) for each in self.deepspeed_moe.experts.deepspeed_experts]
        first = torch.stack([expert.wi.weight for expert in experts])
        second = torch.stack([expert.wo.weight for expert in experts])
        inner = functional.relu(functional.grouped_mm(rows, first.transpose(1, 2), offs=ends))
        output: Tensor = functional.grouped_mm(experts[0].dropout(inner), second.transpose(1, 2), offs=ends)
        return output

    def reset(self) -> None:
        """Set the counts to zero."""
        self.tokens.zero_()
        self.overflow.zero_()

    def _z_loss(self, hidden: Tensor) -> Tensor:
        """Return the mean square of the log-sum-exp of the router's logits, to keep them small (Zoph et al. 2022)."""
        logits = functional.linear(hidden.float(), self.deepspeed_moe.gate.wg.weight.float())
        return logits.logsumexp(-1).square().mean()

    def _count(self, counts: Tensor) -> None:
        factor = self.settings.capacity_factor if self.training else self.settings.eval_capacity_factor
        capacity = (counts.sum() / self.num_experts * factor).ceil().long()
        self.tokens += counts.to(self.tokens.device)
        self.overflow += (counts - capacity).clamp(min=0).sum().to(self.overflow.device)


class _Route(NamedTuple):
    """How tokens are sorted by expert, in a random order within each expert, first choices before second ones."""

    order: Tensor
    """int64 [rows]: the choice (token times top_k plus number of the choice) that each row belongs to."""
    token: Tensor
    """int64 [rows]: the token of each row."""
    row: Tensor
    """int64 [tokens, top_k]: the row of each choice."""
    place: Tensor
    """int64 [tokens, top_k]: how many rows of the same expert come before."""

    @classmethod
    def of(cls, chosen: Tensor, counts: Tensor) -> "_Route":
        """Sort the choices [tokens, top_k] of experts that are chosen ``counts`` [experts] times."""
        top_k = chosen.shape[1]
        bits = 31 - len(counts).bit_length() - (top_k - 1).bit_length()
        rank = torch.randint(0, 1 << bits, chosen.shape, dtype=torch.int32, device=chosen.device)
        rank += torch.arange(top_k, dtype=torch.int32, device=chosen.device) << bits
        keys = (chosen.int() << (31 - len(counts).bit_length())) + rank
        order = keys.flatten().sort(stable=True).indices
        row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view_as(chosen)
        return cls(order, order // top_k, row, row - (counts.cumsum(0) - counts)[chosen])


def _take(source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return ``source[index]``. Its gradient is taken in the same way: no additions in an order that may vary.

    ``inverse`` holds, for each row of ``source``, the place or places in the flattened index that name it.
    """
    apply: Callable[..., Tensor] = _Take.apply
    return apply(source, index, inverse)


class _Take(torch.autograd.Function):
    """See ``_take``."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """Return [*index, width]."""
        ctx.save_for_backward(inverse)
        return source[index]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``source``."""
        (inverse,) = ctx.saved_tensors
        taken = slopes[0].flatten(0, -2)[inverse]
        return (taken if inverse.dim() == 1 else taken.sum(1)), None, None
