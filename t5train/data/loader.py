"""Samples of token shards, in an order and with noise that depend only on a seed.

Sample k of a split is window k of its shards: each shard provides its whole windows, one after another. There is no
loader state: the number of samples consumed is the position in training. There is no table of the order either, as its
size would grow with the corpus: the sample at each position is computed when it is read.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from t5train.data import keyed_random
from t5train.data.shards import read_description, tokens_name
from t5train.data.span_corruption import corrupt, geometry
from t5train.errors import DigestMismatch, InputError
from t5train.records.stage_records import TokenShards
from t5train.spec import ObjectiveSpec

ORDER_VERSION = 2
"""Raised when the same seed would give other samples or another order: part of the identity of a training run."""
PREFETCHED_BATCHES = 4
_ORDER, _NOISE = 1, 2  # so that both have different random bits


class Batch(NamedTuple):
    """``sample_ids`` int64 [n], ``inputs`` int32 [n, input_tokens], ``targets`` int32 [n, target_tokens]."""

    sample_ids: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray


class Windows:
    """The windows of a split, mapped from its shards: ``windows[ids]`` is [n, window_tokens].

    Raises InputError when the split does not have a single whole window, DigestMismatch for a file of the wrong size.
    """

    def __init__(self, shards: TokenShards, split: str, window_tokens: int) -> None:
        self._dtype = np.dtype(f"<u{int(shards.counts['bytes_per_token'])}")
        self._shards = [
            mapped
            for number in range(int(shards.counts["num_shards"]))
            if len(mapped := self._map(shards.path, split, number, window_tokens))
        ]
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        if not self._shards:
            raise InputError(
                f"the {split} split has {shards.counts[f'{split}_tokens']} tokens in "
                f"{shards.counts['num_shards']} shards, and no shard has one window of {window_tokens} tokens: add "
                "text, give the split a larger share (corpus.split), raise shards.shard_tokens or lower "
                "objective.input_tokens"
            )
        self._window_tokens = window_tokens

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        by_place = np.argsort(ids, kind="stable")  # disks and page caches are fastest when read forward
        ascending = ids[by_place]
        bounds = np.searchsorted(ascending, self._ends)
        windows = np.empty((len(ids), self._window_tokens), dtype=self._dtype)
        first = 0
        for shard, end, last in zip(self._shards, self._ends, bounds, strict=True):
            if last > first:
                windows[by_place[first:last]] = shard[ascending[first:last] - (end - len(shard))]
            first = last
        return windows

    def _map(self, folder: Path, split: str, number: int, window_tokens: int) -> np.ndarray:
        path = folder / tokens_name(split, number)
        tokens = read_description(folder, number).splits[split].tokens
        if path.stat().st_size != tokens * self._dtype.itemsize:
            raise DigestMismatch(f"{path} has {path.stat().st_size} bytes, not {tokens} tokens: run the shards stage")
        count = tokens // window_tokens
        if not count:
            return np.empty((0, window_tokens), dtype=self._dtype)
        return np.memmap(path, self._dtype, mode="r", shape=(count, window_tokens))


class Samples:
    """Span-corrupted samples of one split, in an endless sequence.

    With ``shuffle``, each epoch is a permutation of the split keyed by (seed, epoch), and noise is keyed by
    (seed, epoch, sample id). Without it, the order is always that of the ids, and the noise that of epoch 0.
    """

    def __init__(self, shards: TokenShards, split: str, objective: ObjectiveSpec, seed: int, shuffle: bool) -> None:
        self._geometry = geometry(objective)
        self._windows = Windows(shards, split, self._geometry.window_tokens)
        self._first_sentinel_id = int(shards.counts["first_sentinel_id"])
        self._eos_id = int(shards.counts["eos_id"])
        self._seed, self._shuffle = seed, shuffle

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return len(self._windows)

    def batch(self, start: int, count: int) -> Batch:
        """Samples ``start`` to ``start + count`` (exclusive) of the endless sequence."""
        epochs, places = np.divmod(np.arange(start, start + count), self.num_samples)
        if self._shuffle:
            ids = keyed_random.permuted(places, self.num_samples, self._seed, _ORDER, epochs)
        else:
            ids, epochs = places, np.zeros_like(places)
        key = keyed_random.keys(self._seed, _NOISE, epochs, ids)
        inputs, targets = corrupt(self._windows[ids], key, self._geometry, self._first_sentinel_id, self._eos_id)
        return Batch(ids, inputs, targets)


class Prefetched(Iterator[Batch]):
    """Batches that a thread prepares ahead; close it, or leave its ``with``, to end the thread.

    An exception of the source is raised where its batch would have come. ``waited_seconds`` is the total time the
    consumer spent waiting.
    """

    def __init__(self, source: Iterator[Batch], depth: int) -> None:
        self.waited_seconds = 0.0
        self._source = source
        self._free = Semaphore(depth)
        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._prepare, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        started = time.perf_counter()
        item = self._ready.get()
        self.waited_seconds += time.perf_counter() - started
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._free.release()
        return item

    def close(self) -> None:
        """End the thread; batches it has prepared are dropped."""
        self._closed = True
        self._free.release()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._closed:
                    return
                self._ready.put(next(self._source))
        except BaseException as error:
            # All exceptions, including StopIteration, belong to the consumer.
            self._ready.put(error)
