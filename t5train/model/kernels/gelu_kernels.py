"""Kernels of the gated GELU; ``gated_gelu`` launches them."""

import triton
import triton.language as tl


@triton.jit
def gelu_forward(joint, output, width, BLOCK: tl.constexpr):
    """Write a block of columns of one row of the output."""
    row, columns, held = _place(width, BLOCK)
    gate = tl.load(joint + row * 2 * width + columns, mask=held, other=0.0).to(tl.float32)
    value = tl.load(joint + row * 2 * width + width + columns, mask=held, other=0.0).to(tl.float32)
    tanh, _ = _tanh_of_gelu(gate)
    result = 0.5 * gate * (1.0 + tanh) * value
    tl.store(output + row * width + columns, result.to(output.dtype.element_ty), mask=held)


@triton.jit
def gelu_backward(slope, joint, gradient, width, BLOCK: tl.constexpr):
    """Write a block of columns of both halves of one row of the gradient."""
    row, columns, held = _place(width, BLOCK)
    gate = tl.load(joint + row * 2 * width + columns, mask=held, other=0.0).to(tl.float32)
    value = tl.load(joint + row * 2 * width + width + columns, mask=held, other=0.0).to(tl.float32)
    above = tl.load(slope + row * width + columns, mask=held, other=0.0).to(tl.float32)
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
def _tanh_of_gelu(x):
    """Return the tanh in GELU's approximation, and the derivative of its argument."""
    argument = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    decay = tl.exp(-2.0 * tl.abs(argument))  # at most 1
    tanh = (1.0 - decay) / (1.0 + decay)
    return tl.where(argument < 0, -tanh, tanh), 0.7978845608028654 * (1.0 + 0.134145 * x * x)
