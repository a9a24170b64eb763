"""The gated GELU of T5 v1.1, and its dropout by keys, as a custom operator on the joint output of both input layers.

In the backward pass, the code that ``torch.compile`` generates for it takes more than twice as long, because it
computes the activation again for each half of the gradient.
Dropout in a kernel of its own would read and write all of it again in both passes.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn

from t5train.model.counted_dropout import lowest_kept
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
def gated_gelu(joint: Tensor, keys: Tensor | None = None, dropout_rate: float = 0.0) -> Tensor:
    """Return gelu(gate) * value, [..., f], of ``joint`` [..., 2 f], which holds the gate before the value.

    GELU is the tanh approximation. With ``keys`` int64 [...], a share ``dropout_rate`` is dropped, the same as by
    CountedDropout, and the rest is divided by the share that is kept. All of it is computed in fp32 and rounded once.
    """
    joint = joint.contiguous()
    output = joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)
    gelu_kernels.gelu_forward[_grid(joint)](joint, _contiguous(keys), output, **_settings(joint, dropout_rate))
    return output


@gated_gelu.register_fake
def _(joint: Tensor, keys: Tensor | None = None, dropout_rate: float = 0.0) -> Tensor:
    del keys, dropout_rate
    return joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)


@operator
def _gated_gelu_backward(slope: Tensor, joint: Tensor, keys: Tensor | None, dropout_rate: float) -> Tensor:
    """Return the gradient of ``joint``; the mask is drawn again."""
    slope, joint = slope.contiguous(), joint.contiguous()
    gradient = torch.empty_like(joint)
    gelu_kernels.gelu_backward[_grid(joint)](
        slope, joint, _contiguous(keys), gradient, **_settings(joint, dropout_rate)
    )
    return gradient


@_gated_gelu_backward.register_fake
def _(slope: Tensor, joint: Tensor, keys: Tensor | None, dropout_rate: float) -> Tensor:
    del slope, keys, dropout_rate
    return torch.empty_like(joint, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
    del output
    *tensors, ctx.dropout_rate = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
    return _gated_gelu_backward(slope, *ctx.saved_tensors, ctx.dropout_rate), None, None


gated_gelu.register_autograd(_differentiate, setup_context=_save)


def _contiguous(keys: Tensor | None) -> Tensor | None:
    return None if keys is None else keys.contiguous()


def _grid(joint: Tensor) -> tuple[int, int]:
    """Return the number of rows, and of blocks of columns."""
    width = joint.shape[-1] // 2
    return joint.numel() // (2 * width), triton.cdiv(width, _BLOCK)


def _settings(joint: Tensor, dropout_rate: float) -> dict[str, Any]:
    dropout = {"LOWEST": lowest_kept(dropout_rate), "SCALE": 1 / (1 - dropout_rate)}
    return {"width": joint.shape[-1] // 2, "BLOCK": _BLOCK, "num_warps": _WARPS, **dropout, **ROUNDING}
