"""Packing: which pairs share a row of a batch, so that little of it is padding.

Pairs come in an order keyed by a seed, and each goes into the oldest open row that has space for its source and its
target (first fit). If none has, a row is opened. More than ``OPEN_ROWS`` are never open: the oldest, which is the
fullest, is closed. So the time per pair does not grow with the number of rows, and it costs little: of 51,285
translated messages in rows of 256 and 192 tokens, 0.947 are real tokens with 16, 64 or 256 open rows, and in rows of
256 and 256, 64 open rows need as many rows as an unlimited number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from t5train.data.samples import keyed_random

OPEN_ROWS = 64
_SAMPLE_PAIRS = 10_000
_SOURCE_TOKENS = (128, 256, 512)
_MULTIPLE, _MOST_TOKENS = 32, 16384
"""Suggested lengths of rows are multiples of the first, which suits GPUs, and at most what PairsSpec allows."""
_FEW_LONGER = 0.01
_AS_GOOD = 0.02


class Rows(NamedTuple):
    """Row r has the pairs with the numbers ``pairs[firsts[r] : firsts[r + 1]]``.

    ``pairs`` int64 [n] are the numbers of all pairs, ``firsts`` int64 [rows + 1].
    """

    pairs: np.ndarray
    firsts: np.ndarray


def packed(lengths: np.ndarray, row: tuple[int, int], *seed: int) -> Rows:
    """Pack at least one pair into rows, by first fit in an order that ``seed`` selects.

    ``lengths`` [n, 2] are the tokens of each source and target, at least 1 and at most those of a ``row``.
    """
    order = keyed_random.permuted(np.arange(len(lengths)), len(lengths), *seed)
    row_of_each = _first_fit(lengths[order], row)
    firsts = np.concatenate([[0], np.cumsum(np.bincount(row_of_each))])
    return Rows(order[np.argsort(row_of_each, kind="stable")], firsts)


def unpacked(count: int) -> Rows:
    """Return rows of one pair each, in order."""
    return Rows(np.arange(count), np.arange(count + 1))


def _first_fit(lengths: np.ndarray, row: tuple[int, int]) -> np.ndarray:
    """Return the number of the row of each pair, int64 [n]."""
    found, newest = np.empty(len(lengths), np.int64), -1
    sources, targets = np.zeros((2, OPEN_ROWS), np.int64)  # the space in open rows, the oldest first
    for number, (source, target) in enumerate(lengths.tolist()):
        fits = (sources >= source) & (targets >= target)
        place = int(fits.argmax())
        if not fits[place]:
            newest += 1
            place = OPEN_ROWS - 1
            for space, tokens in zip((sources, targets), row, strict=True):
                space[:-1] = space[1:]
                space[place] = tokens
        sources[place] -= source
        targets[place] -= target
        found[number] = newest - (OPEN_ROWS - 1 - place)
    return found


class RowShape(NamedTuple):
    """What rows of ``input_tokens`` and ``target_tokens`` would hold if pairs were packed into them and cut."""

    input_tokens: int
    target_tokens: int
    real_share: float
    """Share of the tokens of rows that are not padding."""
    longer_share: float
    """Share of the pairs that are longer than a row."""
    pairs: float
    """Mean number of pairs in a row."""


def row_shapes(lengths: np.ndarray, chosen: tuple[int, int]) -> list[RowShape]:
    """Return how well pairs of these lengths [n, 2] fill rows: those chosen first, then others from small to large.

    They are packed as the stage of pair shards does it; of more than 10,000 pairs, a sample is.
    """
    places = np.arange(min(len(lengths), _SAMPLE_PAIRS))
    sample = lengths[keyed_random.permuted(places, len(lengths), 0)]
    source, target = sample.sum(axis=0)
    ratios = (0.5, 1.0, float(target / source))
    wanted = ((tokens, min(_MOST_TOKENS, ratio * tokens)) for tokens in _SOURCE_TOKENS for ratio in ratios)
    others = {(tokens, _MULTIPLE * max(1, round(targets / _MULTIPLE))) for tokens, targets in wanted}
    return [_row_shape(lengths, sample, row) for row in (chosen, *sorted(others - {chosen}))]


def _row_shape(lengths: np.ndarray, sample: np.ndarray, row: tuple[int, int]) -> RowShape:
    cut = np.minimum(sample, row)
    rows = len(packed(cut, row, 0).firsts) - 1
    longer = float((lengths > row).any(axis=1).mean())
    return RowShape(*row, float(cut.sum() / (rows * sum(row))), longer, len(sample) / rows)


def best_shape(shapes: Sequence[RowShape]) -> RowShape:
    """Return the smallest of the shapes that are as well filled as the best, to 0.02, and cut few pairs.

    Few are 1%; if every shape cuts more, those that cut fewest are compared. Attention costs more in longer rows.
    """
    most = max(_FEW_LONGER, min(shape.longer_share for shape in shapes))
    able = [shape for shape in shapes if shape.longer_share <= most]
    well_filled = max(shape.real_share for shape in able) - _AS_GOOD
    return min(
        (shape for shape in able if shape.real_share >= well_filled),
        key=lambda shape: shape.input_tokens + shape.target_tokens,
    )
