"""The batches of all rows, formed once from their lengths, so that no result depends on who decodes which batch."""

from typing import NamedTuple

import numpy as np

MOST_PARTS = 4096
"""A part is one batch, or as many consecutive ones as keep the number of files of parts below this."""
_LEAST_MARGIN_TOKENS = 8


class BatchPlan(NamedTuple):
    """``order`` int64 [rows] are the numbers of all rows, the longest sources first.

    ``starts`` int64 [batches + 1] are the places in it where a batch begins, and its end.
    """

    order: np.ndarray
    starts: np.ndarray

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return -(-(len(self.starts) - 1) // self._part_batches)

    @property
    def _part_batches(self) -> int:
        return -(-(len(self.starts) - 1) // MOST_PARTS)

    def rows_of(self, batch: int) -> np.ndarray:
        """Return the numbers of the rows of a batch, int64 [n]."""
        return self.order[self.starts[batch] : self.starts[batch + 1]]

    def batches_of(self, part: int) -> range:
        """Return the numbers of the batches of a part."""
        return range(part * self._part_batches, min((part + 1) * self._part_batches, len(self.starts) - 1))

    def rows_in(self, part: int) -> int:
        """Return how many rows a part has."""
        batches = self.batches_of(part)
        return int(self.starts[batches.stop] - self.starts[batches.start])


class BatchLimits(NamedTuple):
    """How large a batch may be. A row that is longer is a batch of its own."""

    tokens: int
    """Of sources, padded, and of hypotheses, if all have the most tokens; once for each beam."""
    sequences: int
    """Those of all beams."""
    num_beams: int
    max_new_tokens: int

    def most_rows(self, longest: int) -> int:
        """Return how many rows may be a batch whose longest source has so many tokens."""
        sequences = min(self.sequences, self.tokens // (longest + self.max_new_tokens))
        return max(1, sequences // self.num_beams)


def batch_plan(lengths: np.ndarray, limits: BatchLimits) -> BatchPlan:
    """Form batches of sources with ``lengths`` int64 [rows] in tokens, those of similar length together.

    So their hypotheses are of similar length, too, and few rows wait for others. The longest are first: if memory is
    too small, that shows at once.
    """
    order = np.argsort(-lengths, kind="stable")
    starts = [0]
    while starts[-1] < len(order):
        longest = int(lengths[order[starts[-1]]])
        starts.append(min(len(order), starts[-1] + limits.most_rows(longest)))
    return BatchPlan(order, np.array(starts, np.int64))


def with_margin(longest: int) -> int:
    """Return the most tokens of a hypothesis where the longest reference has ``longest``: a quarter more."""
    return longest + max(_LEAST_MARGIN_TOKENS, longest // 4)
