"""What kernels must know of rows of pairs: which tiles and tokens attention sees, and what dropout drops."""

import triton
import triton.language as tl


@triton.jit
def visited(seen, b, block, blocks, n):
    """The first of the n others that a block must visit, and where they end; ``seen`` [batch, blocks, 2] has both."""
    begin, end = 0, n
    if seen is not None:
        at = seen + (b * blocks + block) * 2
        begin, end = tl.load(at), tl.load(at + 1)
    return begin, end


@triton.jit
def of_tokens(tokens, b, n, places):
    """What [batch, n] holds for the tokens at these places; 0 past the end."""
    return tl.load(tokens + b.to(tl.int64) * n + places, mask=places < n, other=0)


@triton.jit
def segments_of_queries(segments, b, n, queries):
    """Segments of queries; those of padding are no key's."""
    found = of_tokens(segments, b, n, queries)
    return tl.where(found == 0, -1, found)


@triton.jit
def dropout_of_queries(tokens, b, n, queries, h):
    """Both halves of the queries' keys for a head: ``counted_dropout.branch``."""
    mixed = (of_tokens(tokens, b, n, queries) ^ h).to(tl.uint64) + 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return _halves(mixed ^ (mixed >> 31))


@triton.jit
def dropout_of_row(keys, row):
    """Both halves of the key of one row of features."""
    return _halves(tl.load(keys + row).to(tl.uint64))


@triton.jit
def dropout_of_features(numbers):
    """The columns of ``counted_dropout.dropped`` for features."""
    return numbers.to(tl.uint32) * 0x9E3779B9


@triton.jit
def dropout_of_keys(tokens, b, n, keys):
    """The columns of ``counted_dropout.dropped`` for keys of attention."""
    return dropout_of_features(of_tokens(tokens, b, n, keys))


@triton.jit
def _halves(key):
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def kept_of(low, high, columns, LOWEST: tl.constexpr):
    """Which numbers ``counted_dropout.dropped`` keeps, given a row of one kind and a column of the other."""
    hashed = (low + columns) ^ high
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    hashed ^= hashed >> 16
    return hashed.to(tl.int32, bitcast=True) >= LOWEST
