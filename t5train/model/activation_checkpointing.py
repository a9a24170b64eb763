"""Activation checkpointing (Chen et al. 2016): activations within a block are recomputed in the backward pass.

Uses torch's non-reentrant checkpointing. Its graph is that of an ordinary pass, so gradients are summed in the same
order and are bit-identical. The state of random generators is restored for the second pass, so dropout is the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recomputable(nn.Module):
    """A module that runs its parts with ``recomputed`` if ``self.recompute`` is set."""

    recompute = False


def checkpoint_activations(model: nn.Module) -> None:
    """Make every block of ``model`` keep only its inputs for the backward pass, and recompute its activations."""
    for module in model.modules():
        if isinstance(module, Recomputable):
            module.recompute = True


def recomputed(part: Callable[..., Tensor], *inputs: Tensor | tuple[Tensor | None, ...] | None) -> Tensor:
    """Return ``part(*inputs)`` without keeping its activations: the backward pass runs ``part`` again to save memory.

    Dropout repeats, because the state of the random generators is restored.
    """
    if not torch.is_grad_enabled():
        return part(*inputs)
    output: Tensor = checkpoint(part, *inputs, use_reentrant=False)
    return output
