"""Hashes of runs of n consecutive words, and the MinHash of a passage's runs.

A word is a maximal run of letters, digits and underscores, in lower case: neither punctuation nor the width of white
space counts. All arithmetic is on integers modulo 2**64, so the results are the same on every machine.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import numpy as np

BUCKETS, HASHES_A_BUCKET = 14, 8
"""Two passages of which a share s of the 5-grams is equal agree in a bucket with probability 1 - (1 - s**8)**14: a half
at s = 0.72. These are the defaults of datatrove, and close to those of FineWeb (Penedo et al. 2024)."""
NEAR_DUPLICATE_WORDS = 5
_WORD = re.compile(r"\w+")
_MOST_WORDS = 1 << 20
"""Hashes of so many different words are remembered."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
"""Shifts and factors of the finalizer of SplitMix64 (Steele et al. 2014)."""
_CHUNK_GRAMS = 64 << 10
"""The MinHash of so many runs is computed at a time: their hashes stay in the cache of a core."""


class Grams(NamedTuple):
    """The runs of n words of some texts."""

    hashes: np.ndarray
    """uint64, of all runs of the first text, then of the second, and so on."""
    counts: np.ndarray
    """int64: how many runs each text has. One with fewer than n words has none."""


class HashedWords(NamedTuple):
    """The words of some texts."""

    hashes: np.ndarray
    """uint64, of all words of the first text, then of the second, and so on."""
    counts: np.ndarray
    """int64: how many words each text has."""


class WordHashes(dict[str, int]):
    """The 64-bit hash of each word: computed once, and forgotten if there are too many words."""

    def __missing__(self, word: str) -> int:
        """Compute the hash of a word."""
        if len(self) >= _MOST_WORDS:
            self.clear()
        value = self[word] = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
        return value

    def of(self, texts: Sequence[str]) -> HashedWords:
        """Return the hashes of the words of texts."""
        words = [_WORD.findall(text.lower()) for text in texts]
        counts = np.array([len(each) for each in words], np.int64)
        hashes = map(self.__getitem__, chain.from_iterable(words))
        return HashedWords(np.fromiter(hashes, np.uint64, int(counts.sum())), counts)


def grams(words: HashedWords, length: int) -> Grams:
    """Return the runs of ``length`` consecutive words of each text."""
    counts = np.maximum(words.counts - (length - 1), 0)
    starts = len(words.hashes) - (length - 1)
    if starts <= 0:
        return Grams(np.empty(0, np.uint64), counts)
    combined = words.hashes[:starts].copy()
    for place in range(1, length):
        combined = _mixed(combined * _FACTOR + words.hashes[place : place + starts])
    of_text = np.repeat(np.arange(len(words.counts)), words.counts)
    return Grams(combined[of_text[:starts] == of_text[length - 1 :]], counts)


def bucket_keys(found: Grams) -> np.ndarray:
    """Return one key per text and bucket: uint64 of shape (BUCKETS, texts); 0 for texts without runs.

    Texts with the same key in a bucket have the same smallest values of its eight hash functions (Broder 1997).
    """
    keys = np.zeros((BUCKETS, len(found.counts)), np.uint64)
    filled = np.flatnonzero(found.counts)
    ends = np.cumsum(found.counts[filled])
    first = 0
    while first < len(filled):
        before = ends[first] - found.counts[filled[first]]
        last = max(first + 1, int(np.searchsorted(ends, before + _CHUNK_GRAMS, side="right")))
        inside = slice(first, last)
        starts = ends[inside] - found.counts[filled[inside]] - before
        keys[:, filled[inside]] = _keys_of(found.hashes[before : ends[last - 1]], starts)
        first = last
    return keys


def _keys_of(hashes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    keys = np.empty((BUCKETS, len(starts)), np.uint64)
    values = np.empty_like(hashes)
    for bucket in range(BUCKETS):
        key = np.zeros(len(starts), np.uint64)
        for number in range(bucket * HASHES_A_BUCKET, (bucket + 1) * HASHES_A_BUCKET):
            np.multiply(hashes, _FACTORS[number], out=values)
            np.add(values, _TERMS[number], out=values)
            key = _mixed(key * _FACTOR + np.minimum.reduceat(values, starts))
        keys[bucket] = np.maximum(key, np.uint64(1))
    return keys


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return values of which each bit depends on all bits of the given ones."""
    for shift, factor in _MIXERS:
        values = (values ^ (values >> np.uint64(shift))) * factor
    return np.asarray(values ^ (values >> np.uint64(31)))


def _random_numbers(purpose: str) -> np.ndarray:
    digests = (blake2b(f"{purpose} {number}".encode(), digest_size=8) for number in range(BUCKETS * HASHES_A_BUCKET))
    return np.array([int.from_bytes(each.digest(), "little") for each in digests], np.uint64)


_FACTORS, _TERMS = _random_numbers("factor") | np.uint64(1), _random_numbers("term")
"""Of the functions x -> (factor * x + term) mod 2**64 (Dietzfelbinger et al. 1997), one for each hash."""
