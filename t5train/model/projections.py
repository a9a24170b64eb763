"""Linear layers that may have adapters, and several of them as one product."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from t5train.model.lora import LoraLinear


def projected(layer: nn.Linear, hidden: Tensor, keys: Tensor | None) -> Tensor:
    """Return the output of a linear layer; ``keys`` of the tokens decide what the dropout of its adapter drops."""
    output: Tensor = layer(hidden, keys) if isinstance(layer, LoraLinear) else layer(hidden)
    return output


def joint_projection(hidden: Tensor, *layers: nn.Linear, keys: Tensor | None = None) -> Tensor:
    """Return the outputs of linear layers without offsets, one after the other in the last dimension.

    One large product is faster than several small ones, and the gradient of ``hidden`` is a product instead of a sum of
    products. The last bits differ. Layers with adapters have products of their own.
    """
    if any(isinstance(layer, LoraLinear) for layer in layers):
        return torch.cat([projected(layer, hidden, keys) for layer in layers], dim=-1)
    return functional.linear(hidden, torch.cat([layer.weight for layer in layers]))
