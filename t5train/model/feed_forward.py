"""T5's dense feed-forward layers."""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.counted_dropout import CountedDropout
from t5train.model.lora import joint_projection, projected
from t5train.model.model_shape import T5Shape


class FeedForward(nn.Module):
    """The feed-forward layer of v1.0, with ReLU."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.wi = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.wo = nn.Linear(shape.d_ff, shape.d_model, bias=False)
        self.dropout = CountedDropout(shape.dropout_rate)

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """[b, n, d_model] to the same shape; ``keys`` [b, n] are those of CountedDropout."""
        inner = functional.relu(projected(self.wi, hidden, keys))
        return projected(self.wo, self.dropout(inner, keys), keys)


class GatedFeedForward(nn.Module):
    """The feed-forward layer of v1.1, gated by the tanh approximation of GELU (Shazeer 2020, GEGLU).

    With a ``kernel``, training calls it on the joint output of both input layers, with keys and rate of dropout.
    """

    kernel: Callable[[Tensor, Tensor | None, float], Tensor] | None = None

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.wi_1 = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.wo = nn.Linear(shape.d_ff, shape.d_model, bias=False)
        self.dropout = CountedDropout(shape.dropout_rate)

    def forward(self, hidden: Tensor, keys: Tensor | None = None) -> Tensor:
        """[b, n, d_model] to the same shape; ``keys`` [b, n] are those of CountedDropout."""
        return projected(self.wo, self._gated(hidden, keys), keys)

    def _gated(self, hidden: Tensor, keys: Tensor | None) -> Tensor:
        """Return what the output layer takes, [b, n, d_ff], after dropout."""
        if self.kernel is None or not self.training:
            gated = self._gelu(projected(self.wi_0, hidden, keys)) * projected(self.wi_1, hidden, keys)
        else:
            joint = joint_projection(hidden, (self.wi_0, self.wi_1), (keys, keys))
            if keys is not None and self.dropout.p:  # without p, keys are for the dropout of adapters
                return self.kernel(joint, keys, self.dropout.p)
            gated = self.kernel(joint, None, 0.0)
        return cast(Tensor, self.dropout(gated, keys))

    def _gelu(self, hidden: Tensor) -> Tensor:
        """Compute GELU's tanh approximation: one kernel in training, otherwise step by step, as Hugging Face rounds."""
        if self.training:
            return functional.gelu(hidden, approximate="tanh")
        return 0.5 * hidden * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (hidden + 0.044715 * hidden.pow(3.0))))
