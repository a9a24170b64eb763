"""Groups of passages that have equal keys. Keys are sorted in rounds, and only the groups stay in memory."""

from collections.abc import Callable, Iterator

import numpy as np

MOST_KEYS = 16 << 20
"""So many keys are sorted at a time, which takes up to 1.2 GB."""
Keys = tuple[np.ndarray, ...]
"""One or two arrays of uint64. Passages are equal if all their numbers are; the first number decides what is sorted
together, and 0 there stands for none."""


def equal_pairs(chunks: Callable[[], Iterator[Keys]], count: int) -> Iterator[np.ndarray]:
    """Yield pairs of passages with equal keys: int64 of shape (pairs, 2).

    A group of n passages gives n - 1 pairs that connect it, each with the earlier passage first.

    Args:
        chunks: Yields the keys of consecutive passages. It is called once for every ``MOST_KEYS`` passages.
        count: The number of all passages.

    """
    rounds = max(1, -(-count // MOST_KEYS))
    for number in range(rounds):
        yield _pairs_of_round(chunks(), number, rounds)


def _pairs_of_round(chunks: Iterator[Keys], number: int, rounds: int) -> np.ndarray:
    chosen, before = list[tuple[Keys, np.ndarray]](), 0
    for keys in chunks:
        first = keys[0]
        inside = np.flatnonzero((first != 0) & (first % np.uint64(rounds) == number))
        chosen.append((tuple(each[inside] for each in keys), inside + before))
        before += len(first)
    if not chosen:
        return np.empty((0, 2), np.int64)
    keys = tuple(map(np.concatenate, zip(*(each for each, _ in chosen), strict=True)))
    passages = np.concatenate([each for _, each in chosen])
    order = np.lexsort(keys[::-1])  # stable, so equal passages stay in their order
    is_equal = np.logical_and.reduce([each[order][1:] == each[order][:-1] for each in keys])
    return np.stack((passages[order[:-1]][is_equal], passages[order[1:]][is_equal]), axis=1)


def ungrouped(count: int) -> np.ndarray:
    """Return the groups of ``count`` passages of which each is alone: the number of the first passage of its group."""
    return np.arange(count, dtype=np.uint32 if count <= np.iinfo(np.uint32).max else np.int64)


def join_groups(firsts: np.ndarray, pairs: np.ndarray) -> None:
    """Join the groups of the two passages of each pair. ``firsts`` has the first passage of the group of each."""
    while True:
        ends = np.sort(firsts[pairs], axis=1)
        ends = ends[ends[:, 0] != ends[:, 1]]
        if not len(ends):
            return
        np.minimum.at(firsts, ends[:, 1], ends[:, 0])
        while (firsts != (shorter := firsts[firsts])).any():
            firsts[:] = shorter
