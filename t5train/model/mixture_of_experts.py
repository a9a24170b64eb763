"""Experts instead of a feed-forward layer: DeepSpeed's MoE layer, as in Switch Transformers (Fedus et al. 2022)."""

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
        self.reset()

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, n, d_model] to the same shape."""
        gate = self.deepspeed_moe.gate
        gate.drop_tokens = gate.use_rts = gate.top2_2nd_expert_sampling = self.training
        output: Tensor
        output, balance_loss, counts = super().forward(hidden)
        self.router_loss = self.settings.aux_loss * balance_loss + self.settings.z_loss * self._z_loss(hidden)
        self._count(counts)
        return output

    def reset(self) -> None:
        """Set the counts to zero."""
        self.tokens = torch.zeros(self.num_experts, dtype=torch.int64)
        self.overflow = torch.zeros((), dtype=torch.int64)

    def _z_loss(self, hidden: Tensor) -> Tensor:
        """Return the mean square of the log-sum-exp of the router's logits, to keep them small (Zoph et al. 2022)."""
        logits = functional.linear(hidden.float(), self.deepspeed_moe.gate.wg.weight.float())
        return logits.logsumexp(-1).square().mean()

    def _count(self, counts: Tensor) -> None:
        factor = self.settings.capacity_factor if self.training else self.settings.eval_capacity_factor
        capacity = (counts.sum() / self.num_experts * factor).ceil().long()
        self.tokens = self.tokens.to(counts.device) + counts
        self.overflow = self.overflow.to(counts.device) + (counts - capacity).clamp(min=0).sum()
