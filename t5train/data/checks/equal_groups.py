"""Groups of passages that have equal keys, found part by part with bounded memory."""

from collections.abc import Callable, Iterator

import numpy as np

MOST_KEYS = 32 << 20
"""So many keys are sorted at a time, which takes about 1 GiB."""
Keys = tuple[np.ndarray, ...]
"""One or two arrays of uint64. Passages are equal if all their numbers are; the first number decides what is sorted
together, and 0 there stands for none."""


def equal_pairs(parts: Callable[[], Iterator[Keys]], count: int) -> np.ndarray:
    """Return pairs of passages with equal keys: int64 of shape (pairs, 2).

    A group of n passages gives n - 1 pairs that connect it, each with the earlier passage first.

    Args:
        parts: Yields the keys of consecutive passages. It is called once for every ``MOST_KEYS`` passages.
        count: The number of all passages.

    """
    rounds = max(1, -(-count // MOST_KEYS))
    found = [_pairs_of_round(parts(), number, rounds) for number in range(rounds)]
    return np.concatenate(found)


def _pairs_of_round(parts: Iterator[Keys], number: int, rounds: int) -> np.ndarray:
    chosen, before = list[tuple[Keys, np.ndarray]](), 0
    for keys in parts:
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


def first_of_groups(count: int, pairs: np.ndarray) -> np.ndarray:
    """Return the first passage of the group of each passage: int64. Pairs, directly or in a chain, make a group."""
    firsts = np.arange(count)
    while True:
        ends = np.sort(firsts[pairs], axis=1)
        ends = ends[ends[:, 0] != ends[:, 1]]
        if not len(ends):
            return firsts
        np.minimum.at(firsts, ends[:, 1], ends[:, 0])
        while (firsts != (shorter := firsts[firsts])).any():
            firsts = shorter
