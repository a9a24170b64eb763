"""Activation checkpointing (Chen et al. 2016): what lies within a block is computed again when it is needed.

The one place that knows how: torch's non-reentrant form, whose graph is that of an ordinary pass, so that gradients are
summed in the same order and are bit-equal. Generators are set back for the second pass, so that dropout falls alike.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputable(nn.Module):
    """A module that asks ``self.recompute`` whether to run its parts by ``recomputed``."""

    recompute = False


def checkpoint_activations(model: nn.Module) -> None:
    """From now on every block of ``model`` keeps its inputs for the backward pass, and nothing of what lies within."""
    for module in model.modules():
        if isinstance(module, Recomputable):
            module.recompute = True


def recomputed(part: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """``part(*inputs)``, to be run a second time in the backward pass."""
    if not torch.is_grad_enabled():
        return part(*inputs)
    output: Tensor = checkpoint(part, *inputs, use_reentrant=False)
    return output
