"""The batches of all rows, formed once from their lengths, so that no result depends on who decodes which batch."""

from typing import NamedTuple

import numpy as np

PART_BATCHES = 8
"""A part is so many consecutive batches: what is lost, at most, of each process that is killed."""
_LEAST_TARGET_TOKENS = 64
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
        return -(-(len(self.starts) - 1) // PART_BATCHES)

    def rows_of(self, batch: int) -> np.ndarray:
        """Return the numbers of the rows of a batch, int64 [n]."""
        return self.order[self.starts[batch] : self.starts[batch + 1]]

    def batches_of(self, part: int) -> range:
        """Return the numbers of the batches of a part."""
        return range(part * PART_BATCHES, min((part + 1) * PART_BATCHES, len(self.starts) - 1))

    def rows_in(self, part: int) -> int:
        """Return how many rows a part has."""
        batches = self.batches_of(part)
        return int(self.starts[batches.stop] - self.starts[batches.start])


def batch_plan(lengths: np.ndarray, batch_tokens: int, num_beams: int, max_new_tokens: int) -> BatchPlan:
    """Form batches of sources with ``lengths`` int64 [rows] in tokens, those of similar length together.

    The sources and targets of a batch, padded and once for each beam, have at most ``batch_tokens``, where a target is
    taken to be as long as the longest source, and 64 tokens at least, but no longer than ``max_new_tokens``. A row that
    is longer is a batch of its own. The longest are first: if memory is too small, that shows at once.
    """
    order = np.argsort(-lengths, kind="stable")
    starts = [0]
    while starts[-1] < len(order):
        longest = int(lengths[order[starts[-1]]])
        width = longest + min(max_new_tokens, max(longest, _LEAST_TARGET_TOKENS))
        starts.append(min(len(order), starts[-1] + max(1, batch_tokens // (width * num_beams))))
    return BatchPlan(order, np.array(starts, np.int64))


def with_margin(longest: int) -> int:
    """Return the most tokens of a hypothesis where the longest reference has ``longest``: a quarter more."""
    return longest + max(_LEAST_MARGIN_TOKENS, longest // 4)
