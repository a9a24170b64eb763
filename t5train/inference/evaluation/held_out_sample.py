"""The held-out pairs that an export is evaluated on: those of each task whose sources have the lowest hashes."""

import heapq
from collections.abc import Iterator
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from t5train.data.pairs.pairs import Pair, read_pairs, tasks_of
from t5train.records.stage_records import Pairs

HELD_OUT: tuple[Literal["validation", "test"], ...] = ("validation", "test")


class SampledPair(NamedTuple):
    """A pair to predict, and its id: ``SPLIT/TASK/NUMBER``, where pairs of a task in a split are numbered from 0."""

    id: str
    task: str
    pair: Pair


def sampled_pairs(pairs: Pairs, most: int) -> Iterator[SampledPair]:
    """Yield at most ``most`` pairs of each split in equal parts of its tasks, in the order of their files."""
    tasks = tasks_of(pairs)
    for split in HELD_OUT:
        for number, task in enumerate(tasks):
            of_task = most // len(tasks) + (number < most % len(tasks))
            every = enumerate(read_pairs(pairs, split, number))
            for place, pair in sorted(heapq.nsmallest(of_task, every, key=_draw)):
                yield SampledPair(f"{split}/{task.task}/{place}", task.task, pair)


def _draw(numbered: tuple[int, Pair]) -> tuple[int, int]:
    number, pair = numbered
    return xxh3_64_intdigest(pair.source.encode()), number


def num_held_out(pairs: Pairs) -> dict[str, int]:
    """Return the number of pairs of each split that has some."""
    return {split: count for split in HELD_OUT if (count := pairs.counts[f"{split}_pairs"])}
