"""Kernels of the optimizer update; ``partition_update`` describes the method and launches them.

A program handles one chunk of a partition. Chunks never span two segments, so no program searches for its parameter.
"""

import triton
import triton.language as tl


@triton.jit
def squares_of_chunks(
    flat, addresses, chunks, partial, num_chunks,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each chunk's sum of squares of its weights and of its gradient to ``partial`` [2, chunks], fp64."""
    start, length, segment, first = _chunk(chunks, num_chunks, ALIGNED)
    gradient = _gradient_at(addresses, segment, first, KIND, ALIGNED)
    of_weights, of_gradients = partial + tl.program_id(0), partial + num_chunks + tl.program_id(0)
    if length == CHUNK:
        tl.store(of_weights, _sum_of_squares(flat + start, length, True, BLOCK))
        tl.store(of_gradients, _sum_of_squares(gradient, length, True, BLOCK))
    else:
        tl.store(of_weights, _sum_of_squares(flat + start, length, False, BLOCK))
        tl.store(of_gradients, _sum_of_squares(gradient, length, False, BLOCK))


@triton.jit
def squares_of_owners(partial, owners, sums, num_chunks, num_owners, WIDTH: tl.constexpr):
    """Add up the chunks of one parameter (first program index), its weights or its gradient (second index)."""
    owner, kind = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(owners + owner), tl.load(owners + num_owners + owner).to(tl.int32)
    lanes = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float64)
    for at in range(0, count, WIDTH):
        total += tl.load(partial + kind * num_chunks + first + at + lanes, mask=at + lanes < count, other=0.0)
    tl.store(sums + kind * num_owners + owner, tl.sum(total, 0))


@triton.jit
def update_chunks(
    flat, moment1, moment2, addresses, rounded, chunks, owner_of_segment, is_decayed, sums, numels, norm,
    decay, share1, beta2, share2, correction, epsilon, rate, clip, num_chunks,
    KIND: tl.constexpr, RELATIVE: tl.constexpr, CLIPPED: tl.constexpr, MINIMAL: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clip, update moments and weights, and write the rounded weights; change nothing if the norm is not finite."""
    start, length, segment, first = _chunk(chunks, num_chunks, ALIGNED)
    whole_norm = tl.load(norm).to(tl.float32)
    if whole_norm < float("inf"):  # false for NaN
        factor = 1.0
        if CLIPPED:
            factor = 1.0 / tl.maximum((whole_norm + 1e-6) / clip, 1.0)
        decay = tl.where(tl.load(is_decayed + segment) != 0, decay, 1.0)
        if RELATIVE:
            owner = tl.load(owner_of_segment + segment)
            rms = tl.sqrt(tl.load(sums + owner) / tl.load(numels + owner)).to(tl.float32)
            rate *= tl.maximum(rms * tl.abs(decay), MINIMAL)  # the RMS after the decay
        gradient = _gradient_at(addresses, segment, first, KIND, ALIGNED)
        if length == CHUNK:
            _update(flat + start, moment1 + start, moment2 + start, gradient, rounded, start, length, factor, decay,
                    share1, beta2, share2, correction, epsilon, rate, True, BLOCK)  # fmt: skip
        else:
            _update(flat + start, moment1 + start, moment2 + start, gradient, rounded, start, length, factor, decay,
                    share1, beta2, share2, correction, epsilon, rate, False, BLOCK)  # fmt: skip


@triton.jit
def _chunk(chunks, num_chunks, ALIGNED: tl.constexpr):
    """Return this program's chunk: first element in the partition, length, segment, first element in the segment."""
    row = chunks + tl.program_id(0)
    start, length = tl.load(row), tl.load(row + num_chunks).to(tl.int32)
    segment, first = tl.load(row + 2 * num_chunks), tl.load(row + 3 * num_chunks)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start, length, segment, first


@triton.jit
def _gradient_at(addresses, segment, first, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(addresses + segment)
    if ALIGNED:
        address, first = tl.multiple_of(address, 16), tl.multiple_of(first, 16)
    return address.to(tl.pointer_type(KIND)) + first


@triton.jit
def _read(pointer, held, WHOLE: tl.constexpr):
    """Read a block. Whole chunks have no mask, because a mask stops the compiler from moving 16 bytes at a time."""
    return tl.load(pointer) if WHOLE else tl.load(pointer, mask=held, other=0.0)


@triton.jit
def _write(pointer, value, held, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=held)


@triton.jit
def _sum_of_squares(pointer, length, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, length, BLOCK):
        value = _read(pointer + at + lanes, at + lanes < length, WHOLE).to(tl.float64)
        total += value * value
    return tl.sum(total, 0)


@triton.jit
def _update(
    flat, moment1, moment2, gradient, rounded, start, length, factor,
    decay, share1, beta2, share2, correction, epsilon, rate, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    # Four elements a thread, for 16-bit numbers too. With eight, threads had to exchange the fp32 numbers, and the pass
    # took 2.5 ms instead of 1.7 for 248 million parameters on an H200.
    fours = tl.max_contiguous(tl.multiple_of(lanes, 4), 4)
    for at in range(0, length, BLOCK):
        here, held = at + lanes, at + lanes < length
        slope = _read(gradient + at + fours, held, WHOLE).to(tl.float32) * factor
        first, second = _read(moment1 + here, held, WHOLE), _read(moment2 + here, held, WHOLE)
        first += share1 * (slope - first)
        second = second * beta2 + share2 * slope * slope
        weight = _read(flat + here, held, WHOLE) * decay
        weight += rate * tl.div_rn(first, tl.sqrt_rn(second) * correction + epsilon)
        _write(moment1 + here, first, held, WHOLE)
        _write(moment2 + here, second, held, WHOLE)
        _write(flat + here, weight, held, WHOLE)
        if rounded is not None:
            _write(rounded + start + at + fours, weight.to(rounded.dtype.element_ty), held, WHOLE)
