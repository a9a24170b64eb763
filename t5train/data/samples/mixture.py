"""The order of samples of several texts, each of which is trained on at a rate of its own.

Rates are those of T5 (Raffel et al. 2020, section 3.5.2): proportional to the number of samples of a text, but of no
more than a limit, and to the power of 1/T, or as given. The endless sequence of samples consists of blocks. A block has
the same number of samples of each text, in an order that is permuted anew. The samples of a text follow each other as
if it were trained on alone: none is repeated before all of its others were used.

Like the order of one text, nothing is stored: which sample is at a position is computed from the position alone.
"""

from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from t5train.data.samples import keyed_random
from t5train.spec import ObjectiveSpec

BLOCK = 1 << 20
"""Samples of a block. Rates are multiples of 1 / ``BLOCK``."""
_EXACT = Context(prec=30)


class Placed(NamedTuple):
    """Where samples come from: ``ids`` int64 [n] are samples of the whole split, ``epochs`` int64 [n] of their text."""

    ids: np.ndarray
    epochs: np.ndarray


class Mixture:
    """The order of the samples of a split with several texts.

    ``sizes`` are the numbers of samples of each text, all above zero: text 0 has the samples 0 to ``sizes[0]``
    (exclusive) of the split, text 1 those that follow, and so on.
    """

    def __init__(self, sizes: Sequence[int], objective: ObjectiveSpec, seed: int) -> None:
        self._sizes = np.array(sizes)
        self._firsts = np.cumsum(self._sizes) - self._sizes
        self._quotas = np.array(quotas(rates(sizes, objective)))
        self._ends = np.cumsum(self._quotas)
        self._seed = seed

    def placed(self, positions: np.ndarray) -> Placed:
        """Return the samples at ``positions`` [n] of the endless sequence."""
        blocks, places = np.divmod(positions, BLOCK)
        within = keyed_random.permuted(places, BLOCK, self._seed, keyed_random.BLOCKS, blocks)
        texts = np.searchsorted(self._ends, within, side="right")
        used = blocks * self._quotas[texts] + within - (self._ends - self._quotas)[texts]
        epochs, places = np.divmod(used, self._sizes[texts])
        ids = np.empty_like(places)
        for text in np.unique(texts):
            of_text = np.flatnonzero(texts == text)
            ids[of_text] = self._firsts[text] + keyed_random.permuted(
                places[of_text], int(self._sizes[text]), self._seed, keyed_random.ORDER, int(text), epochs[of_text]
            )
        return Placed(ids, epochs)


def block_shares(sizes: Sequence[int], objective: ObjectiveSpec) -> list[Fraction]:
    """Return the share of each text in what is trained on, which sum to 1, from the numbers of samples of each."""
    return [Fraction(quota, BLOCK) for quota in quotas(rates(sizes, objective))]


def rates(sizes: Sequence[int], objective: ObjectiveSpec) -> list[Fraction]:
    """Return the rate of each text, which sum to 1, from the numbers of samples of each.

    The powers are computed in decimal arithmetic, whose results are the same on every machine.
    """
    if objective.mixing_weights is not None:
        parts = [Fraction(weight) for weight in objective.mixing_weights]
    else:
        counted = [min(size, objective.mixing_limit or size) for size in sizes]
        power = _EXACT.divide(Decimal(1), Decimal(objective.mixing_temperature))
        parts = [Fraction(_EXACT.power(Decimal(each), power)) for each in counted]
    return [part / sum(parts) for part in parts]


def quotas(shares: Sequence[Fraction]) -> list[int]:
    """Return how many samples of each text a block has: in proportion, by largest remainders, but at least one."""
    exact = [share * BLOCK for share in shares]
    found = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda text: (found[text] - exact[text], text))
    for text in by_remainder[: BLOCK - sum(found)]:
        found[text] += 1
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] = 1
    return found
