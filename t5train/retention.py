"""Which complete checkpoints are kept. Standard library only."""

import math
from collections.abc import Mapping


def kept(
    sizes: Mapping[int, int], keep_last: int, keep_every: int | None = None, most_bytes: int | None = None
) -> set[int]:
    """Of complete checkpoints, by step and size in bytes, the steps of those to keep.

    The ``keep_last`` newest, and those whose step ``keep_every`` divides; of these, where they and one more as large as
    the newest exceed ``most_bytes``, the oldest go, but for the newest.
    """
    newest_first = sorted(sizes, reverse=True)
    chosen = newest_first[:keep_last]
    chosen += [step for step in newest_first[keep_last:] if keep_every and step % keep_every == 0]
    while len(chosen) > 1 and most_bytes is not None and _with_the_next(chosen, sizes) > most_bytes:
        chosen.pop()
    return set(chosen)


def _with_the_next(chosen: list[int], sizes: Mapping[int, int]) -> int:
    """The next is complete before an old one goes."""
    return sum(sizes[step] for step in chosen) + sizes[chosen[0]]


def most_held(num_steps: int, save_every: int, keep_last: int, keep_every: int | None = None) -> int:
    """How many checkpoints a run has at a time at most: those that are ``kept``, and the one that it writes.

    It saves every ``save_every`` steps and at the last, when it has the most.
    """
    num_before = -(-num_steps // save_every) - 1
    older = max(0, num_before - keep_last)
    marked = older * save_every // math.lcm(save_every, keep_every) if keep_every else 0
    return min(num_before, keep_last) + marked + 1
