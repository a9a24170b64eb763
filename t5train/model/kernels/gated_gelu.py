"""The gated GELU of T5 v1.1 as a custom operator on the joint output of both input layers.

In the backward pass, the code that ``torch.compile`` generates for it takes more than twice as long, because it
computes the activation again for each half of the gradient.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn

from t5train.model.feed_forward import GatedFeedForward
from t5train.model.kernels import gelu_kernels
from t5train.model.kernels.operators import ROUNDING, operator

_BLOCK, _WARPS = 1024, 4


def use_in(model: nn.Module) -> None:
    """Let the gated feed-forward layers of ``model`` use this operator in training."""
    for module in model.modules():
        if isinstance(module, GatedFeedForward):
            module.kernel = gated_gelu


@operator
def gated_gelu(joint: Tensor) -> Tensor:
    """Return gelu(gate) * value, [..., f], of ``joint`` [..., 2 f], which holds the gate before the value.

    GELU is the tanh approximation. All of it is computed in fp32 and rounded once.
    """
    joint = joint.contiguous()
    width = joint.shape[-1] // 2
    output = joint.new_empty(*joint.shape[:-1], width)
    gelu_kernels.gelu_forward[_grid(joint)](joint, output, width, BLOCK=_BLOCK, num_warps=_WARPS, **ROUNDING)
    return output


@gated_gelu.register_fake
def _(joint: Tensor) -> Tensor:
    return joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)


@operator
def _gated_gelu_backward(slope: Tensor, joint: Tensor) -> Tensor:
    """Return the gradient of ``joint``."""
    slope, joint = slope.contiguous(), joint.contiguous()
    gradient = torch.empty_like(joint)
    gelu_kernels.gelu_backward[_grid(joint)](
        slope, joint, gradient, joint.shape[-1] // 2, BLOCK=_BLOCK, num_warps=_WARPS, **ROUNDING
    )
    return gradient


@_gated_gelu_backward.register_fake
def _(slope: Tensor, joint: Tensor) -> Tensor:
    del slope
    return torch.empty_like(joint, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, slope: Tensor) -> Tensor:
    gradient: Tensor = _gated_gelu_backward(slope, *ctx.saved_tensors)
    return gradient


gated_gelu.register_autograd(_differentiate, setup_context=_save)


def _grid(joint: Tensor) -> tuple[int, int]:
    """Return the number of rows, and of blocks of columns."""
    width = joint.shape[-1] // 2
    return joint.numel() // (2 * width), triton.cdiv(width, _BLOCK)
