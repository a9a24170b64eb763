"""Random bits that are a function of a key and a counter, the same with every version of every library.

The mixing function is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

import numpy as np

Bits = np.ndarray  # of uint64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keys(*parts: int | np.ndarray) -> Bits:
    """One key for each combination of ``parts`` (broadcast, non-negative); their order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mixed((key ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return key


def bits(key: Bits, count: int) -> Bits:
    """64 random bits for each of ``count`` counters: shape [*key.shape, count]."""
    return _mixed(key[..., np.newaxis] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def permutation(size: int, *parts: int) -> np.ndarray:
    """A permutation of ``range(size)`` that ``parts`` decide: int64 [size]."""
    return np.argsort(bits(keys(*parts), size)[0], kind="stable")


def _mixed(value: Bits) -> Bits:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)))
