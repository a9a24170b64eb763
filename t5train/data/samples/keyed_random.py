"""Random bits as a pure function of a key and a counter, independent of the versions of libraries.

The mixing function is that of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

import math

import numpy as np

Bits = np.ndarray  # of uint64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8
ORDER, NOISE, BLOCKS, PACKING, DROPOUT = 1, 2, 3, 4, 5
"""Parts of keys, so that the order of samples, their noise, the order of texts and so on get different random bits."""


def keys(*parts: int | np.ndarray) -> Bits:
    """Return a key for each combination of ``parts``, which are non-negative and broadcast. Their order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mixed((key ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return key


def bits(key: Bits, count: int) -> Bits:
    """Return 64 random bits for each of ``count`` counters: shape [*key.shape, count]."""
    return bits_at(key[..., np.newaxis], np.arange(count))


def bits_at(key: Bits, counters: np.ndarray) -> Bits:
    """Return the 64 random bits of each of ``counters``, which broadcast with ``key``."""
    return _mixed(key + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def permuted(places: np.ndarray, size: int, *parts: int | np.ndarray) -> np.ndarray:
    """Return the elements at ``places`` [n] of a permutation of ``range(size)``: int64 [n].

    ``parts`` select the permutation; a part that is an array [n] selects one for each place. Time and memory depend
    only on the number of places. A Feistel network permutes ``range(side**2)``, where ``side**2`` is the smallest
    square that is at least ``size``. Results outside ``range(size)`` go through it again until they are inside (cycle
    walking; Black and Rogaway: Ciphers with arbitrary finite domains, 2002). For sizes of at least 400, fewer than one
    place in ten needs this.
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    rounds = np.broadcast_to(keys(*parts, np.arange(_ROUNDS)[:, np.newaxis]), (_ROUNDS, len(places)))
    found = _through_network(places.astype(np.uint64), side, rounds)
    while len(outside := np.flatnonzero(found >= size)):
        found[outside] = _through_network(found[outside], side, rounds[:, outside])
    return found.astype(np.int64)


def _through_network(places: Bits, side: np.uint64, rounds: Bits) -> Bits:
    """Permute ``range(side**2)``: each round adds a hash of one coordinate to the other."""
    left, right = np.divmod(places, side)
    for key in rounds:
        left, right = right, (left + _mixed((key ^ right) + _GOLDEN) % side) % side
    return left * side + right


def _mixed(value: Bits) -> Bits:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)))
