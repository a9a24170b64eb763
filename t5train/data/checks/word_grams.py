"""Hashes of runs of n consecutive words, and the MinHash of a passage's runs.

A word is a maximal run of letters, digits, underscores and the marks that belong to them, in lower case and in
Unicode's composed form (NFC). In scripts that are written without spaces (Chinese, Japanese, Thai, Lao, Khmer and
Burmese), each character is a word. Punctuation and the width of white space do not count. All arithmetic is on integers
modulo 2**64, so the results are the same on every machine.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import numpy as np

BUCKETS, HASHES_A_BUCKET = 14, 8
"""Two passages of which a share s of the 5-grams is equal agree in a bucket with probability 1 - (1 - s**8)**14: 0.65
at s = 0.72, 0.92 at 0.8 and 0.05 at 0.5. These are the defaults of datatrove, as for FineWeb (Penedo et al. 2024)."""
NEAR_DUPLICATE_WORDS = 5
_WORD = re.compile(r"\w+")
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai and Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana and Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Chinese characters
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
"""Ranges of code points."""
_LAST_LETTER = 0x33FFF
"""No letter, digit or mark is assigned beyond, except the selectors of variants."""
_MOST_WORDS = 1 << 20
"""Hashes of so many different words are remembered."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
"""Shifts and factors of the finalizer of SplitMix64 (Steele et al. 2014)."""
_CHUNK_GRAMS = 64 << 10
"""The MinHash of so many runs is computed at a time, because their hashes stay in the cache of a core."""


def words_of(text: str) -> list[str]:
    """Return the words of a text in order."""
    if text.isascii():
        return _WORD.findall(text.lower())
    lower = unicodedata.normalize("NFC", text).lower()
    in_any_script, is_needed = _patterns()
    return (in_any_script if is_needed.search(lower) else _WORD).findall(lower)


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of a word in any script, and that of the characters for which it is needed.

    In text without them, the faster pattern of ASCII words finds the same. Making both takes a fraction of a second.
    """
    without_spaces = {code for first, last in _WITHOUT_SPACES for code in range(first, last + 1)}
    single, joined, marks = list[int](), list[int](), list[int]()
    for code in chain(range(_LAST_LETTER + 1), range(0xE0100, 0xE01F0)):  # and selectors of variants
        category = unicodedata.category(chr(code))
        if category in {"Mn", "Mc"}:
            marks.append(code)
        elif category[0] in "LN" or chr(code) == "_":
            (single if code in without_spaces else joined).append(code)
    needed = "".join(_ranges(sorted(code for code in (*single, *marks) if code < 0x10000)))  # a class of these is fast
    alone, letters, mark = ("".join(_ranges(each)) for each in (single, joined, marks))
    in_any_script = re.compile(f"[{alone}][{mark}]*|[{letters}][{letters}{mark}]*")
    return in_any_script, re.compile(f"[{needed}]|[\U00010000-\U0010ffff]")


def _ranges(codes: Sequence[int]) -> Iterator[str]:
    """Yield ascending code points as ranges of a character class."""
    first = last = codes[0]
    for code in codes[1:]:
        if code != last + 1:
            yield rf"\U{first:08x}-\U{last:08x}"
            first = code
        last = code
    yield rf"\U{first:08x}-\U{last:08x}"


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
        words = list(map(words_of, texts))
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
