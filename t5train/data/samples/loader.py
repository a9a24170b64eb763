"""Samples of token shards, in an order and with noise that depend only on a seed.

A window is a fixed number of consecutive tokens of a shard. Sample k of a split is window k, counted over the whole
windows of all shards. The loader has no state: the number of samples consumed is the position in training. The order is
not stored in a table, whose size would grow with the corpus. The sample at each position is computed when it is read.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from t5train.data.passages import SPLITS
from t5train.data.samples import keyed_random
from t5train.data.samples.mixture import Mixture, Placed, rates
from t5train.data.samples.span_corruption import corrupt, geometry
from t5train.data.shards import read_description, tokens_name
from t5train.data.vocabulary.held_out import read_held_out
from t5train.errors import DigestMismatch, InputError
from t5train.quantities import quantity
from t5train.records.locations import redacted
from t5train.records.stage_records import TokenShards
from t5train.spec import ObjectiveSpec, RunSpec

ORDER_VERSION = 2
"""Incremented when the same seed would give other samples to train on, or in another order. Part of the identity of a
training run. Samples that are only measured do not count."""
PREFETCHED_BATCHES = 4
HELD_OUT_SEED = 0
"""Seed of the order and noise of splits that are not trained on, so that runs with different seeds compare."""


class Segments(NamedTuple):
    """Which pair of its row each token of a batch of pairs belongs to.

    ``inputs`` int32 [n, input_tokens] and ``targets`` int32 [n, target_tokens] count the pairs of a row from 1; padding
    is 0. ``input_keys`` and ``target_keys``, int64 of the same shapes, are the keys of dropout: functions of the seed,
    the epoch, the pair, its side, and the token's place in the pair; None without dropout. ``global_targets`` is the
    number of target tokens, padding left out, in the batch of all ranks and passes of a step.
    """

    inputs: np.ndarray
    targets: np.ndarray
    input_keys: np.ndarray | None
    target_keys: np.ndarray | None
    global_targets: int


class Batch(NamedTuple):
    """n samples: ``sample_ids`` and ``epochs`` int64 [n], ``inputs`` int32 [n, input_tokens], ``targets`` int32
    [n, target_tokens]. The epoch of a sample of a mixture is that of its text. ``segments`` of pairs; None of text.
    """

    sample_ids: np.ndarray
    epochs: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    segments: Segments | None = None


class Windows:
    """The windows of a split, memory-mapped from its shards: ``windows[ids]`` is [n, window_tokens].

    Raises InputError if the split has no whole window, DigestMismatch if a file has the wrong size.
    """

    def __init__(self, shards: TokenShards, split: str, window_tokens: int) -> None:
        self._dtype = np.dtype(f"<u{int(shards.counts['bytes_per_token'])}")
        self.of_texts: dict[int, int] = {}
        """The number of windows of each text of a mixture, in the order of windows; of one text, ``{0: len(self)}``."""
        self._shards = list[np.ndarray]()
        for number in range(int(shards.counts["num_shards"])):
            description = read_description(shards.path, number)
            mapped = self._map(
                shards.path / tokens_name(split, number), description.splits[split].tokens, window_tokens
            )
            self.of_texts[description.part] = self.of_texts.get(description.part, 0) + len(mapped)
            self._shards += [mapped] if len(mapped) else []
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        if not self._shards:
            counts, passages = shards.counts, sum(shards.counts[f"{each}_documents"] for each in SPLITS)
            raise InputError(
                f"the {split} split is too small: a sample needs {window_tokens} consecutive tokens of one shard, but "
                f"the split has {quantity(int(counts[f'{split}_tokens']), 'token')} in "
                f"{quantity(int(counts['num_shards']), 'shard')}, from {counts[f'{split}_documents']:,} of the text's "
                f"{quantity(passages, 'passage')}. Add text, divide it into more passages, give the split a larger "
                "share (corpus.split), raise shards.shard_tokens, or lower objective.input_tokens"
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

    def _map(self, path: Path, tokens: int, window_tokens: int) -> np.ndarray:
        if path.stat().st_size != tokens * self._dtype.itemsize:
            raise DigestMismatch(
                f"{path} is damaged: it has {path.stat().st_size} bytes, but {tokens * self._dtype.itemsize} were "
                "recorded. Use `t5-pretrain run` or `tokenize` to make damaged token shards again"
            )
        count = tokens // window_tokens
        if not count:
            return np.empty((0, window_tokens), dtype=self._dtype)
        return np.memmap(path, self._dtype, mode="r", shape=(count, window_tokens))


def num_windows(shards: TokenShards, split: str, window_tokens: int) -> int:
    """Return the number of windows of a split, which may be 0."""
    return sum(windows_of_texts(shards, split, window_tokens))


def windows_of_texts(shards: TokenShards, split: str, window_tokens: int) -> list[int]:
    """Return the number of windows of a split in each text of a mixture; of one text, one number."""
    found: dict[int, int] = {}
    for number in range(int(shards.counts["num_shards"])):
        description = read_description(shards.path, number)
        windows = description.splits[split].tokens // window_tokens
        found[description.part] = found.get(description.part, 0) + windows
    return [found[text] for text in sorted(found)]


class Samples:
    """Span-corrupted samples of one split, in an endless sequence.

    Each epoch of the train split is a permutation of it keyed by (seed, epoch), and noise is keyed by
    (seed, epoch, sample id). Another split repeats one epoch, which is the same for every ``seed``.

    The train split of a mixture has the order of ``t5train.data.samples.mixture``; the other splits hold all texts in
    proportion to their sizes. Raises InputError if a text of a mixture has no whole window to train on.
    """

    def __init__(self, shards: TokenShards, split: str, objective: ObjectiveSpec, seed: int) -> None:
        self._geometry = geometry(objective)
        self._windows = Windows(shards, split, self._geometry.window_tokens)
        self._first_sentinel_id = int(shards.counts["first_sentinel_id"])
        self._eos_id = int(shards.counts["eos_id"])
        self._is_trained = split == "train"
        self._seed = seed if self._is_trained else HELD_OUT_SEED
        self._mixture = None
        if self._is_trained and len(self._windows.of_texts) > 1:
            require_samples_of_each(self._windows.of_texts)
            sizes = list(self._windows.of_texts.values())
            self._mixture = Mixture(sizes, rates(sizes, objective), seed)

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch; of a mixture, the number of different samples of all its texts."""
        return len(self._windows)

    def batch(self, start: int, count: int) -> Batch:
        """Return samples ``start`` to ``start + count`` (exclusive) of the endless sequence."""
        ids, epochs = self._placed(np.arange(start, start + count))
        key = noise_keys(self._seed, epochs, ids)
        inputs, targets = corrupt(self._windows[ids], key, self._geometry, self._first_sentinel_id, self._eos_id)
        return Batch(ids, epochs, inputs, targets)

    def _placed(self, positions: np.ndarray) -> Placed:
        if self._mixture is not None:
            return self._mixture.placed(positions)
        if not self._is_trained:
            return placed_held_out(positions, self.num_samples)
        return placed_in_epochs(positions, self.num_samples, self._seed)


def require_enough_samples(spec: RunSpec, shards: TokenShards) -> None:
    """Raise InputError unless the shards have a batch to train on, a sample to validate on, and a held-out passage."""
    window_tokens = geometry(spec.objective).window_tokens
    windows = Windows(shards, "train", window_tokens)
    require_batch(spec, len(windows))
    require_samples_of_each(windows.of_texts, spec.corpus.named())
    Windows(shards, "validation", window_tokens)
    read_held_out(shards.path)


def require_samples_of_each(of_texts: Mapping[int, int], names: Sequence[str] = ()) -> None:
    """Raise InputError if a text of a mixture, of which these are the numbers of windows, has none to train on."""
    for text, samples in of_texts.items():
        if not samples:
            named = repr(redacted(names[text])) if names else f"text {text} of the mixture (0 is corpus.source)"
            raise InputError(
                f"{named} has less text for training than a sample needs. Add text to it, leave it out, give training "
                "a larger share (corpus.split), raise shards.shard_tokens, or lower objective.input_tokens"
            )


def require_batch(spec: RunSpec, num_samples: int) -> None:
    """Raise InputError if a step takes more samples than the train split has."""
    batch = spec.optimizer.global_batch_sequences
    if num_samples < batch:
        raise InputError(
            f"the train split holds {quantity(num_samples, 'sample')} of {geometry(spec.objective).window_tokens} "
            f"tokens, but a step takes optimizer.global_batch_sequences ({batch}). Add text, or lower "
            "optimizer.global_batch_sequences or objective.input_tokens"
        )


def placed_in_epochs(positions: np.ndarray, num_samples: int, seed: int) -> Placed:
    """Return the samples at ``positions`` [n] of a split without a mixture that is trained on."""
    epochs, places = np.divmod(positions, num_samples)
    return Placed(keyed_random.permuted(places, num_samples, seed, keyed_random.ORDER, epochs), epochs)


def placed_held_out(positions: np.ndarray, num_samples: int) -> Placed:
    """Return the samples at ``positions`` [n] of a split that is not trained on, which repeats one epoch."""
    places = positions % num_samples
    return Placed(_held_out(places, num_samples), np.zeros_like(places))


def drawn_held_out(count: int, num_samples: int) -> np.ndarray:
    """Return the ids, int64 [count], of the first samples of a split of ``num_samples`` that is not trained on."""
    return _held_out(np.arange(count), num_samples)


def _held_out(places: np.ndarray, num_samples: int) -> np.ndarray:
    return keyed_random.permuted(places, num_samples, HELD_OUT_SEED, keyed_random.ORDER, 0)


def noise_keys(seed: int, epochs: np.ndarray, ids: np.ndarray) -> keyed_random.Bits:
    """Return the keys for ``corrupt`` of the samples ``ids`` [n] in ``epochs`` [n]."""
    return keyed_random.keys(seed, keyed_random.NOISE, epochs, ids)


class Prefetched(Iterator[Batch]):
    """An iterator over batches that a thread prepares in advance.

    ``close``, or leaving the ``with`` block, ends the thread. If the source raises an exception, it is raised in place
    of the next batch. ``waited_seconds`` is the total time that the consumer has spent waiting.
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
        """End the thread, and drop the batches that it has prepared."""
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
            # The consumer gets all exceptions, including StopIteration.
            self._ready.put(error)
