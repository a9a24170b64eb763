"""Batches of pairs, in an order that depends only on a seed.

A sample is a row of pair shards: several pairs of one task to train on, one pair of another split. As in
``t5train.data.samples.loader``, there is no state: the sample at each position is computed when it is read.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from t5train.data.pairs.pair_shard_worker import CUT, IDS, LENGTHS, ROWS, spans
from t5train.data.pairs.pair_shards import shard_file
from t5train.data.pairs.task_rates import rates_of_rows
from t5train.data.samples import keyed_random
from t5train.data.samples.loader import Batch, Segments, placed_held_out, placed_in_epochs
from t5train.data.samples.mixture import Mixture, Placed
from t5train.errors import DigestMismatch, InputError
from t5train.records.stage_records import PairShards
from t5train.spec import PairsSpec

SOURCE, TARGET = 0, 1
"""The sides of a pair."""


class _Side(NamedTuple):
    """One side of the tokens of some rows, one after the other; all are arrays [tokens]."""

    tokens: np.ndarray
    rows: np.ndarray
    """Which row of the batch each is in."""
    columns: np.ndarray
    segments: np.ndarray
    keys: np.ndarray | None


class _Shard:
    """The rows of a task in one split, memory-mapped. Raises DigestMismatch if a file has the wrong size."""

    def __init__(self, shards: PairShards, split: str, task: int) -> None:
        def mapped(kind: str, dtype: str, columns: int = 1) -> np.ndarray:
            name = shard_file(split, task, kind)
            path, size = shards.path / name, shards.files[name].size
            if path.stat().st_size != size:
                raise DigestMismatch(
                    f"{path} is damaged: it has {path.stat().st_size} bytes, but {size} were recorded. Use "
                    "`t5-pretrain finetune` to make damaged pair shards again"
                )
            flat = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
            return flat.reshape(-1, columns) if columns > 1 else flat

        self._task = task
        self._tokens = mapped("tokens", f"<u{shards.counts['bytes_per_token']}")
        self._lengths = mapped("lengths", LENGTHS, 2)
        self._ids = mapped("ids", IDS)
        self._rows = mapped("rows", ROWS, 3)
        self._cut = mapped("cut", CUT) if shard_file(split, task, "cut") in shards.files else np.empty(0, CUT)

    def __len__(self) -> int:
        return len(self._rows) - 1

    @property
    def longest_target(self) -> int:
        """The number of tokens of the longest target."""
        return int(self._lengths[:, TARGET].max(initial=0))

    def target_tokens(self, rows: np.ndarray) -> int:
        """Return the number of target tokens in rows [n]."""
        return int((self._rows[rows + 1, 2] - self._rows[rows, 2]).sum())

    def has_cut_target(self, rows: np.ndarray) -> np.ndarray:
        """Return of each of rows [n], which are not packed, whether the target is longer than the row, bool [n]."""
        return np.isin(rows, self._cut)

    def sides(self, rows: np.ndarray, places: np.ndarray, epochs: np.ndarray, seed: int | None) -> list[_Side]:
        """Return sources and targets of rows [n], which are at ``places`` [n] of a batch and of ``epochs`` [n].

        Keys of dropout are drawn with ``seed``, if there is one.
        """
        first_pairs, first_tokens, _ = self._rows[rows].T
        num_pairs, num_tokens, _ = (self._rows[rows + 1] - self._rows[rows]).T
        pairs = spans(first_pairs, num_pairs)
        tokens = self._tokens[spans(first_tokens, num_tokens)]
        row_of_pair = np.repeat(np.arange(len(rows)), num_pairs)
        first_of_row = np.repeat(np.cumsum(num_pairs) - num_pairs, num_pairs)
        segments = np.arange(1, len(pairs) + 1) - first_of_row
        lengths = self._lengths[pairs].astype(np.int64)
        before = np.cumsum(lengths, axis=0) - lengths
        columns = (before - before[first_of_row]).ravel()
        # From here on, for each token; pair p has the texts 2p (its source) and 2p + 1 (its target).
        texts = np.repeat(np.arange(2 * len(pairs)), lengths.ravel())
        places_in_text = np.arange(len(tokens)) - (np.cumsum(lengths) - lengths.ravel())[texts]
        keys = None
        if seed is not None:
            of_pairs = (self._task, epochs[row_of_pair, np.newaxis], self._ids[pairs, np.newaxis])
            of_texts = keyed_random.keys(seed, keyed_random.DROPOUT, *of_pairs, np.array([SOURCE, TARGET])).ravel()
            keys = keyed_random.bits_at(of_texts[texts], places_in_text).view(np.int64)
        rows_of_texts, segments_of_texts = np.repeat(places[row_of_pair], 2), np.repeat(segments, 2)
        return [
            _Side(
                tokens[chosen],
                rows_of_texts[texts[chosen]],
                columns[texts[chosen]] + places_in_text[chosen],
                segments_of_texts[texts[chosen]],
                None if keys is None else keys[chosen],
            )
            for chosen in (np.flatnonzero(texts % 2 == side) for side in (SOURCE, TARGET))
        ]


class PairSamples:
    """The rows of one split, in an endless sequence of batches.

    Each epoch of the train split is a permutation of its rows keyed by (seed, epoch). Rows of several tasks have the
    order of ``t5train.data.samples.mixture``, at the rates of ``t5train.data.pairs.task_rates``. Another split repeats
    one epoch, which is the same for every ``seed``.

    With ``dropout``, batches have the keys of dropout. Those of a token depend on the seed, the epoch, its task, its
    pair, the side of the pair and its place in that, but not on the row or batch that the pair is in.

    Raises InputError if the split has no pairs.
    """

    def __init__(self, shards: PairShards, split: str, spec: PairsSpec, seed: int, dropout: bool = False) -> None:
        self._shards = [_Shard(shards, split, task) for task in range(shards.counts["num_shards"])]
        sizes = [len(shard) for shard in self._shards]
        self._ends = np.cumsum(sizes)
        if not self.num_samples:
            raise InputError(f"the {split} split has no pairs. Add some, or give it a larger share (pairs.split)")
        self._pad_id = shards.counts["pad_id"]
        self._seed = seed
        self._dropout_seed = seed if dropout else None
        self._is_trained = split == "train"
        self._widths = (shards.counts["input_tokens"], shards.counts["target_tokens"]) if self._is_trained else None
        self._mixture = None
        if self._is_trained and len(sizes) > 1:
            self._mixture = Mixture(sizes, rates_of_rows(shards, spec), seed)

    @property
    def num_samples(self) -> int:
        """The number of different samples: rows to train on; pairs of another split, which are not packed."""
        return int(self._ends[-1])

    @property
    def longest_target(self) -> int:
        """The number of tokens of the longest target of all tasks, with EOS, as it was cut."""
        return max(shard.longest_target for shard in self._shards)

    def batch(self, start: int, count: int, *, shuffled: bool = False) -> Batch:
        """Return samples ``start`` to ``start + count`` (exclusive) of the endless sequence.

        Rows to train on have the lengths of a row; those of another split are as long as the longest of the batch.
        ``segments.global_targets`` is the number of target tokens in this batch. With ``shuffled``, each target is
        paired with the source of the next sample, which makes sense where rows are not packed.
        """
        ids, epochs = self._placed(np.arange(start, start + count))
        sides = self._sides(ids, epochs)
        if shuffled:
            sides[SOURCE] = self._sides(*self._placed(np.arange(start + 1, start + 1 + count)))[SOURCE]
        (inputs, input_segments, input_keys), (targets, target_segments, target_keys) = (
            self._padded(side, count, number) for number, side in enumerate(sides)
        )
        segments = Segments(input_segments, target_segments, input_keys, target_keys, len(sides[TARGET].tokens))
        return Batch(ids, epochs, inputs, targets, segments)

    def targets_of(self, start: int, count: int) -> int:
        """Return the number of target tokens of samples ``start`` to ``start + count``. Reads no tokens."""
        ids = self._placed(np.arange(start, start + count)).ids
        return sum(shard.target_tokens(rows) for shard, _, rows in self._by_task(ids))

    def have_cut_targets(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return of each sample, which is one held-out pair, whether its target was cut, bool [n]."""
        found = np.zeros(len(sample_ids), bool)
        for shard, places, rows in self._by_task(sample_ids):
            found[places] = shard.has_cut_target(rows)
        return found

    def task_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of the task of each sample, int64 [n]."""
        return np.searchsorted(self._ends, sample_ids, side="right")

    def _placed(self, positions: np.ndarray) -> Placed:
        if self._mixture is not None:
            return self._mixture.placed(positions)
        if not self._is_trained:
            return placed_held_out(positions, self.num_samples)
        return placed_in_epochs(positions, self.num_samples, self._seed)

    def _by_task(self, ids: np.ndarray) -> Iterator[tuple[_Shard, np.ndarray, np.ndarray]]:
        """Yield the shard of each task, the places of its samples among ``ids``, and their rows in the shard."""
        tasks = self.task_of(ids)
        for task in np.unique(tasks):
            places, shard = np.flatnonzero(tasks == task), self._shards[task]
            yield shard, places, ids[places] - (self._ends[task] - len(shard))

    def _sides(self, ids: np.ndarray, epochs: np.ndarray) -> list[_Side]:
        of_tasks = [
            shard.sides(rows, places, epochs[places], self._dropout_seed) for shard, places, rows in self._by_task(ids)
        ]
        return [_joined([sides[side] for sides in of_tasks]) for side in (SOURCE, TARGET)]

    def _padded(self, side: _Side, count: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens, segments and keys, [count, width] each."""
        width = self._widths[number] if self._widths else int(side.columns.max()) + 1
        where = (side.rows, side.columns)
        tokens = np.full((count, width), self._pad_id, np.int32)
        segments, keys = np.zeros((count, width), np.int32), np.zeros((count, width), np.int64)
        tokens[where], segments[where] = side.tokens, side.segments
        if side.keys is None:
            return tokens, segments, None
        keys[where] = side.keys
        return tokens, segments, keys


def _joined(sides: list[_Side]) -> _Side:
    tokens, rows, columns, segments = (np.concatenate(each) for each in list(zip(*sides, strict=True))[:-1])
    keys = [side.keys for side in sides if side.keys is not None]
    return _Side(tokens, rows, columns, segments, np.concatenate(keys) if keys else None)
