"""Experts instead of a feed-forward layer: DeepSpeed's MoE layer, as in Switch Transformers (Fedus et al. 2022).

With another ``dispatch`` than DeepSpeed's, training sorts the tokens by expert (see ``expert_dispatch``). DeepSpeed's
layer computes the same with masks of all tokens and experts and a product for each expert, in many more kernels.
Evaluation always uses DeepSpeed's layer.
"""

import math
from typing import Literal, cast

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor
from torch.nn import functional

from t5train.model.expert_dispatch import Experts, Route, apply_in_rows, apply_in_slots
from t5train.model.feed_forward import FeedForward
from t5train.model.model_shape import T5Shape


class SparseFeedForward(MoE):  # type: ignore[misc]  # DeepSpeed has no types
    """ReLU experts; an fp32 router chooses one or two of them for each token.

    In training, an expert takes up to ``capacity_factor`` times its even share of a micro-batch. If more tokens are
    routed to it, random ones are dropped; without a factor, none are. Evaluation drops none, so that its result depends
    only on the tokens.

    ``router_loss`` is the weighted loss of the last forward pass. ``tokens`` [num_experts] counts the tokens routed to
    each expert since the last ``reset``, and ``overflow`` those above capacity.
    """

    router_loss: Tensor
    tokens: Tensor
    overflow: Tensor
    dispatch: Literal["deepspeed", "rows", "slots"] = "deepspeed"
    """How tokens get to their experts in training. Rows need all experts on every rank, slots need a capacity."""

    def __init__(self, shape: T5Shape, expert_parallel_size: int) -> None:
        settings = shape.moe
        super().__init__(
            shape.d_model,
            FeedForward(shape),
            num_experts=settings.num_experts,
            ep_size=expert_parallel_size,
            k=settings.top_k,
            capacity_factor=settings.capacity_factor or 1.0,  # has no effect if no tokens are dropped
            min_capacity=0,
        )
        self.settings = settings
        # Buffers, because a CUDA graph adds to them in place.
        self.register_buffer("tokens", torch.zeros(settings.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("overflow", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, n, d_model] to the same shape."""
        if self.training and self.dispatch != "deepspeed":
            return self._train(hidden)
        gate = self.deepspeed_moe.gate
        gate.use_rts = gate.top2_2nd_expert_sampling = self.training
        gate.drop_tokens = self.training and self.settings.capacity_factor is not None
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
        route = Route.of(chosen, self.num_experts)
        weights = probabilities.gather(1, chosen)
        if (capacity := self._capacity(len(chosen))) is not None:
            weights = weights * (route.place < capacity)
        if chosen.shape[1] > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        if self.dispatch == "rows":
            taken = apply_in_rows(self._experts(), tokens, route)
        elif capacity is not None:
            taken = apply_in_slots(self._experts(), tokens, route, capacity)
        else:
            raise ValueError("slots need a capacity: experts without one take tokens in rows")
        output: Tensor = (taken * weights.unsqueeze(2).to(taken.dtype)).sum(1)
        balance = self._balance_loss(probabilities, chosen)
        z_loss = logits.logsumexp(-1).square().mean()
        self.router_loss = self.settings.aux_loss * balance + self.settings.z_loss * z_loss
        self._count(route.counts)
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

    def _experts(self) -> Experts:
        """Return this rank's experts."""
        mine = [cast(FeedForward, each) for each in self.deepspeed_moe.experts.deepspeed_experts]
        first = torch.stack([expert.wi.weight for expert in mine])
        second = torch.stack([expert.wo.weight for expert in mine])
        return Experts(first, second, mine[0].dropout, self.deepspeed_moe.ep_group if self.ep_size > 1 else None)

    def _capacity(self, num_tokens: int) -> int | None:
        """Return how many tokens of a micro-batch an expert takes in training; None if it takes all."""
        factor = self.settings.capacity_factor
        return None if factor is None else math.ceil(num_tokens / self.num_experts * factor * self.settings.top_k)

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
        self.tokens += counts.to(self.tokens.device)
        if factor is not None:
            capacity = (counts.sum() / self.num_experts * factor).ceil().long()
            self.overflow += (counts - capacity).clamp(min=0).sum().to(self.overflow.device)
