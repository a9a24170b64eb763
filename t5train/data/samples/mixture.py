"""The order of samples of several texts, each of which is trained on at a rate of its own.

Rates are those of T5 (Raffel et al. 2020, section 3.5.2): proportional to the number of samples of a text, but of no
more than a limit, and to the power of 1/T, or as given. The endless sequence of samples is divided into blocks. The
rates determine how many samples of each text a block contains, and each block is shuffled with its own permutation.
Within a text, samples come in the order in which they would come if it were the only one: none is repeated until all
have been used.

Like the order of one text, nothing is stored: which sample is at a position is computed from the position alone.
"""

from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from t5train.data.samples import keyed_random
from t5train.spec import MixingSpec

BLOCK = 1 << 16
"""Samples of a block."""
_PRECISE = Context(prec=30)


class Placed(NamedTuple):
    """Where samples come from: ``ids`` int64 [n] are samples of the whole split, ``epochs`` int64 [n] of their text."""

    ids: np.ndarray
    epochs: np.ndarray


class Mixture:
    """The order of the samples of a split with several texts.

    ``sizes`` are the numbers of samples of each text, all above zero: text 0 has the samples 0 to ``sizes[0]``
    (exclusive) of the split, text 1 those that follow, and so on. ``shares`` are those of each text in what is trained
    on, such as ``rates``; they sum to 1.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[Fraction], seed: int) -> None:
        self._sizes = np.array(sizes)
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._rates = shares
        self._seed = seed
        self._block = lru_cache(maxsize=2)(self._block_of)  # consecutive positions are in one block or two

    def placed(self, positions: np.ndarray) -> Placed:
        """Return the samples at ``positions`` [n] of the endless sequence."""
        blocks, places = np.divmod(positions, BLOCK)
        texts, used = np.empty_like(places), np.empty_like(places)
        for block in np.unique(blocks):
            here = np.flatnonzero(blocks == block)
            texts[here], used[here] = (each[places[here]] for each in self._block(int(block)))
        epochs, ids = np.divmod(used, self._sizes[texts])
        for text in np.unique(texts):
            here, size = np.flatnonzero(texts == text), int(self._sizes[text])
            key = (self._seed, keyed_random.ORDER, int(text), epochs[here])
            ids[here] = self._firsts[text] + keyed_random.permuted(ids[here], size, *key)
        return Placed(ids, epochs)

    def _block_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of each sample of a block, and how many samples of that text there are before it."""
        before, after = (numbers_of_texts(self._rates, BLOCK * count) for count in (block, block + 1))
        numbers = np.subtract(after, before)
        places = keyed_random.permuted(np.arange(BLOCK), BLOCK, self._seed, keyed_random.BLOCKS, block)
        texts = np.repeat(np.arange(len(numbers)), numbers)[places]
        used = np.empty_like(texts)
        for text, number in enumerate(numbers):
            used[texts == text] = before[text] + np.arange(number)
        return texts, used


def rates(sizes: Sequence[int], mixing: MixingSpec) -> list[Fraction]:
    """Return the share of each text in what is trained on, from the numbers of samples of each. They sum to 1.

    The powers are computed in decimal arithmetic, whose results are the same on every machine.
    """
    if mixing.mixing_weights is not None:
        parts = [Fraction(str(weight)) for weight in mixing.mixing_weights]  # as written, not as stored in binary
    else:
        counted = [min(size, mixing.mixing_limit or size) for size in sizes]
        power = _PRECISE.divide(Decimal(1), Decimal(mixing.mixing_temperature))
        parts = [Fraction(_PRECISE.power(Decimal(each), power)) for each in counted]
    total = sum(parts)
    return [part / total for part in parts]


def numbers_of_texts(shares: Sequence[Fraction], count: int) -> list[int]:
    """Return how many of the first ``count`` samples are of each text; never fewer than of fewer samples.

    Each text gets its share of what the texts before it leave, rounded. So each number differs from its exact share by
    at most the number of texts.
    """
    numbers, left, rest = list[int](), count, Fraction(1)
    for share in shares[:-1]:
        numbers.append(int(left * (share / rest) + Fraction(1, 2)))
        left -= numbers[-1]
        rest -= share
    return [*numbers, left]
