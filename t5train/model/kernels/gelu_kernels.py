"""Kernels of the gated GELU; ``gated_gelu`` launches them.

With ``keys`` of dropout for each row, they draw the mask of ``t5train.model.counted_dropout`` in both passes.
"""

import triton
import triton.language as tl

from t5train.model.kernels.pair_kernels import dropout_of_features, dropout_of_row, kept_of


@triton.jit
def gelu_forward(joint, keys, output, width, LOWEST: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of columns of one row of the output."""
    row, columns, held = _place(width, BLOCK)
    gate = tl.load(joint + row * 2 * width + columns, mask=held, other=0.0).to(tl.float32)
    value = tl.load(joint + row * 2 * width + width + columns, mask=held, other=0.0).to(tl.float32)
    tanh, _ = _tanh_of_gelu(gate)
    result = _dropped(0.5 * gate * (1.0 + tanh) * value, keys, row, columns, LOWEST, SCALE)
    tl.store(output + row * width + columns, result.to(output.dtype.element_ty), mask=held)


@triton.jit
def gelu_backward(slope, joint, keys, gradient, width, LOWEST: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of columns of both halves of one row of the gradient."""
    row, columns, held = _place(width, BLOCK)
    gate = tl.load(joint + row * 2 * width + columns, mask=held, other=0.0).to(tl.float32)
    value = tl.load(joint + row * 2 * width + width + columns, mask=held, other=0.0).to(tl.float32)
    above = tl.load(slope + row * width + columns, mask=held, other=0.0).to(tl.float32)
    above = _dropped(above, keys, row, columns, LOWEST, SCALE)
    tanh, inner = _tanh_of_gelu(gate)
    of_gate = above * value * 0.5 * (1.0 + tanh + gate * (1.0 - tanh * tanh) * inner)
    of_value = above * 0.5 * gate * (1.0 + tanh)
    tl.store(gradient + row * 2 * width + columns, of_gate.to(gradient.dtype.element_ty), mask=held)
    tl.store(gradient + row * 2 * width + width + columns, of_value.to(gradient.dtype.element_ty), mask=held)


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """Return this program's row and columns, and which of these exist."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), columns, columns < width


@triton.jit
def _dropped(numbers, keys, row, columns, LOWEST: tl.constexpr, SCALE: tl.constexpr):
    """Return 0 for what dropout drops of some columns of a row, and scale the rest. Without keys, it keeps all."""
    if keys is not None:
        low, high = dropout_of_row(keys, row)
        kept = kept_of(low, high, dropout_of_features(columns), LOWEST)
        numbers = tl.where(kept, numbers * SCALE, 0.0)
    return numbers


@triton.jit
def _tanh_of_gelu(x):
    """Return the tanh in GELU's approximation, and the derivative of its argument."""
    argument = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    decay = tl.exp(-2.0 * tl.abs(argument))  # at most 1
    tanh = (1.0 - decay) / (1.0 + decay)
    return tl.where(argument < 0, -tanh, tanh), 0.7978845608028654 * (1.0 + 0.134145 * x * x)
