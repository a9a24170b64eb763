"""Finds the passages of a text that repeat others: copies, near-duplicates, and those that share held-out text.

Held-out text is that of validation, test and test sets.

- A *duplicate* has the text of another passage, except for white space at its ends (128-bit digests are compared).
- A *near-duplicate* agrees with another passage in at least one of 14 buckets of the MinHash of its 5-grams of words.
- A *listed* passage is one of a pair in a file that ``data index duplicates`` wrote.
- A training passage is *contaminated* if it shares 13 consecutive words with a held-out passage.

Groups are transitive: if a resembles b, and b resembles c, then all three are one group.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from t5train.data.checks.equal_groups import equal_pairs, join_groups, ungrouped
from t5train.data.checks.listed_pairs import Listed, first_rows, passages_at, read_rows
from t5train.data.checks.passage_keys import TEST_SET, TRAIN, KnownRuns
from t5train.data.checks.word_grams import BUCKETS
from t5train.data.passages import SPLITS, SplitRule
from t5train.data.segments import FileSegments, Stretch, by_part, divided, size_of_text
from t5train.data.worker_processes import Json, in_processes
from t5train.errors import InputError
from t5train.files.atomic import remove_folder
from t5train.host_resources import require_free_space
from t5train.progress import Progress, adding
from t5train.records.stage_records import REMOVED
from t5train.spec.data_spec import Repetition

CHUNK_BYTES = 64 << 20
MOST_RUNS = 64 << 20
"""Of more different runs of 13 words in held-out text, only those are searched for whose hash is a multiple of a power
of two. What is found then is less than there is."""
_KEYS_BYTES_A_PASSAGE = {"duplicates": 17, "near_duplicates": 8 * BUCKETS, "contaminated": 1}
_LISTED_BYTES_A_PASSAGE = 16
_RUN_BYTES_A_TEXT_BYTE = 5
"""Of held-out text: 12 bytes for each of its words in the keys, 8 among all runs, and up to 4 in the table of bits."""
COMPARED_SPLITS = (*SPLITS, "test_sets")
"""What passages belong to, as the names of counts begin."""


class Chunk(NamedTuple):
    """About 64 MiB of the text."""

    stretches: list[Stretch]
    keys: Path
    shared: Path
    rows: Path
    is_test_set: bool


class Repetitions(NamedTuple):
    """What was found."""

    chunks: list[tuple[list[Stretch], np.ndarray]]
    """For each chunk of the text, bool for each passage that has text: whether it is to be removed from training."""
    counts: dict[str, int]
    """Passages of each of ``COMPARED_SPLITS``, as ``{split}_{kind}``. The kinds are ``passages``; ``duplicates``,
    ``near_duplicates`` and ``listed``, those like an earlier passage of the split; the same with ``_across``, those of
    training text like one that is not, and the reverse; ``contaminated``.

    Also ``removed_passages``; ``kept_duplicates``, passages that stay, with the text of another one; and
    ``searched_one_run_in``: 1, or more if there were too many runs of words to search for, or 0 if there were none."""


class Search(NamedTuple):
    """What to look for, and how."""

    rule: SplitRule
    """Which passages are for training."""
    kinds: Collection[Repetition]
    scratch: Path
    """Folder for the keys that passages are compared by. Files that are there are not made again."""
    workers: int
    """The number of processes."""
    listed: Listed | None = None
    """Pairs of near-duplicates that were found before."""


def find_repetitions(
    files: Sequence[FileSegments], test_sets: Sequence[FileSegments], search: Search, progress: Progress
) -> Repetitions:
    """Find the passages of a text that repeat others, in worker processes.

    Near-duplicates include duplicates, and listed passages include both. Which of several alike is kept depends only on
    the text: the first one in its order, and none if one of them is held out.

    Args:
        files: The text.
        test_sets: Other texts, of which training passages should be free.
        search: What to look for, and how.
        progress: Called with the number of bytes compared and searched, and with the number of buckets.

    Raises:
        InputError: The text was changed after it was scanned, or the listed pairs are not of this text.
        StorageError: There is too little disk space.

    """
    scratch, kinds, rule = search.scratch, search.kinds, search.rule
    scratch.mkdir(exist_ok=True)
    passages = sum(each.passages for each in (*files, *test_sets))
    _require_scratch(search, files, test_sets)
    chunks = _chunks(files, scratch, is_test_set=False) + _chunks(test_sets, scratch, is_test_set=True)
    common: Json = {"near": "near_duplicates" in kinds, "shared": "contaminated" in kinds}
    common |= {"split": list(rule.split), "split_seed": rule.split_seed}
    jobs = [
        common | {"out": str(each.keys), "is_test_set": each.is_test_set, "stretches": each.stretches}
        for each in chunks
        if not each.keys.exists()
    ]
    _work("passage_keys:write_keys", jobs, search.workers, progress, "bytes of text compared")
    found = _Found(chunks)
    if found.num_passages != passages:
        remove_folder(scratch)  # its keys are not those of the text
        raise InputError(
            f"the text has {found.num_passages:,} passages now, but had {passages:,} when it was read: its files were "
            "changed meanwhile. Start again, and leave them as they are until the run has its token shards"
        )
    are_removed = "duplicates" in kinds or "near_duplicates" in kinds or search.listed is not None
    found.mark_copies(are_removed=are_removed)
    if "near_duplicates" in kinds:
        found.mark_near_duplicates(progress)
    if search.listed is not None:
        found.mark_listed(search.listed, files, search.workers, progress)
    if "contaminated" in kinds:
        found.mark_shared(scratch, search.workers, progress)
    return found.result()


class _Found:
    """Marks of all passages, in the order of the text."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks
        splits = [each for (each,) in self._keys("splits")]
        self._ends = np.cumsum([len(each) for each in splits])
        self._splits = np.concatenate(splits)
        self._is_train = self._splits == TRAIN
        self._is_removed = np.zeros(len(self._splits), bool)
        self._firsts = ungrouped(len(self._splits))
        """The first passage of the group of each passage. Groups grow while more is searched for."""
        self._counts = {
            f"{name}_passages": self._number(self._splits == split) for split, name in enumerate(COMPARED_SPLITS)
        }

    @property
    def num_passages(self) -> int:
        """The number of all passages, those of test sets included."""
        return len(self._splits)

    def mark_copies(self, *, are_removed: bool) -> None:
        """Mark the passages with the text of another one, and count them."""
        for pairs in equal_pairs(partial(self._keys, "first", "second"), len(self._splits)):
            join_groups(self._firsts, pairs)
        self._mark_groups("duplicates", are_removed=are_removed)
        kept = self._firsts[~self._is_removed & (self._splits != TEST_SET)]
        self._counts["kept_duplicates"] = len(kept) - len(np.unique(kept))

    def mark_near_duplicates(self, progress: Progress) -> None:
        """Mark the passages that agree in a bucket with another one, and the copies."""
        for number in range(BUCKETS):
            for pairs in equal_pairs(partial(self._keys, f"bucket_{number:02d}"), len(self._splits)):
                join_groups(self._firsts, pairs)
            progress("buckets of near-duplicates compared", number + 1, BUCKETS)
        self._mark_groups("near_duplicates", are_removed=True)

    def mark_listed(self, listed: Listed, files: Sequence[FileSegments], workers: int, progress: Progress) -> None:
        """Mark the passages of listed pairs, and those that are like them by what was marked before."""
        wanted, starts = read_rows(listed, files), first_rows(files)
        chunks = [chunk for chunk in self._chunks if not chunk.is_test_set]
        jobs: list[Json] = [
            {"out": str(chunk.rows), "stretches": chunk.stretches}
            | {"first_rows": [starts[stretch.name] for stretch in chunk.stretches]}
            for chunk in chunks
            if not chunk.rows.exists()
        ]
        _work("listed_pairs:write_rows", jobs, workers, progress, "bytes of text searched for listed passages")
        join_groups(self._firsts, passages_at(listed, wanted, (_rows_and_ids(chunk.rows) for chunk in chunks)))
        self._mark_groups("listed", are_removed=True)

    def mark_shared(self, scratch: Path, workers: int, progress: Progress) -> None:
        """Mark the training passages that share a run of words with others, and count these others."""
        runs, bits = scratch / "runs.npy", scratch / "bits.npy"
        step = self._write_runs(runs, bits)
        self._count_short()
        if not step:
            self._count_shared(np.zeros(len(self._splits), bool), step)
            return
        jobs: list[Json] = [
            {"keys": str(chunk.keys), "runs": str(runs), "bits": str(bits), "out": str(chunk.shared)}
            | {"stretches": chunk.stretches}
            for chunk in self._chunks
            if not chunk.is_test_set and not chunk.shared.exists()
        ]
        _work("passage_keys:write_shared", jobs, workers, progress, "bytes of text searched for held-out text")
        found = [_arrays(chunk.shared, "is_shared", "runs") for chunk in self._chunks if not chunk.is_test_set]
        in_training = np.unique(np.concatenate([each for _, each in found]))
        is_shared = np.zeros(len(self._splits), bool)
        of_text = np.concatenate([each for each, _ in found])
        is_shared[: len(of_text)] = of_text
        for (passages, of_chunk), first in zip(self._keys("run_passages", "runs"), [0, *self._ends[:-1]], strict=True):
            is_shared[first + passages.astype(np.int64)[np.isin(of_chunk, in_training)]] = True
        self._count_shared(is_shared, step)

    def result(self) -> Repetitions:
        """Return what was marked."""
        marks = zip(self._chunks, np.split(self._is_removed, self._ends[:-1]), strict=True)
        chunks = [(chunk.stretches, removed) for chunk, removed in marks if not chunk.is_test_set]
        counts = self._counts | {REMOVED: self._number(self._is_removed)}
        return Repetitions(chunks, counts)

    def _keys(self, *names: str) -> Iterator[tuple[np.ndarray, ...]]:
        return (_arrays(chunk.keys, *names) for chunk in self._chunks)

    def _mark_groups(self, kind: str, *, are_removed: bool) -> None:
        firsts = self._firsts
        has_held_out, has_train = np.zeros(len(firsts), bool), np.zeros(len(firsts), bool)
        has_held_out[firsts[~self._is_train]] = True
        has_train[firsts[self._is_train]] = True
        if are_removed:
            # Without held-out text in a group, its first passage is one of training.
            is_first = firsts == np.arange(len(firsts), dtype=firsts.dtype)
            self._is_removed |= self._is_train & (has_held_out[firsts] | ~is_first)
        for split, name in enumerate(COMPARED_SPLITS):
            inside = self._splits == split
            groups = np.zeros(len(firsts), bool)
            groups[firsts[inside]] = True
            self._counts[f"{name}_{kind}"] = self._number(inside) - self._number(groups)
            across = inside & (has_held_out if split == TRAIN else has_train)[firsts]
            self._counts[f"{name}_{kind}_across"] = self._number(across)

    def _write_runs(self, runs: Path, bits: Path) -> int:
        """Write the runs of words to search for, and return the power of two that they are multiples of; 0 if none."""
        step, kept, merged = 1, np.empty(0, np.uint64), list[np.ndarray]()
        for (of_chunk,) in self._keys("runs"):
            merged.append(np.unique(of_chunk[of_chunk % np.uint64(step) == 0]))
            if sum(map(len, merged)) > MOST_RUNS // 4:
                kept, merged = np.unique(np.concatenate([kept, *merged])), []
            while len(kept) > MOST_RUNS:
                step *= 2
                kept = kept[kept % np.uint64(step) == 0]
        kept = np.unique(np.concatenate([kept, *merged]))
        if not len(kept):
            return 0
        KnownRuns.write(kept, runs, bits)
        return step

    def _count_short(self) -> None:
        """Count the held-out passages that are too short to have a run of words."""
        is_short = np.zeros(len(self._splits), bool)
        for (short,), first in zip(self._keys("short"), [0, *self._ends[:-1]], strict=True):
            is_short[first + short.astype(np.int64)] = True
        for split, name in enumerate(COMPARED_SPLITS):
            if split != TRAIN:
                self._counts[f"{name}_short"] = self._number(is_short & (self._splits == split))

    def _count_shared(self, is_shared: np.ndarray, step: int) -> None:
        self._is_removed |= is_shared & self._is_train
        for split, name in enumerate(COMPARED_SPLITS):
            self._counts[f"{name}_contaminated"] = self._number(is_shared & (self._splits == split))
        self._counts["searched_one_run_in"] = step

    @staticmethod
    def _number(marks: np.ndarray) -> int:
        return int(np.count_nonzero(marks))


def _arrays(path: Path, *names: str) -> tuple[np.ndarray, ...]:
    """Return arrays of an .npz file."""
    with np.load(path) as file:
        return tuple(file[name] for name in names)


def _rows_and_ids(path: Path) -> tuple[np.ndarray, np.ndarray]:
    rows, ids = _arrays(path, "rows", "ids")
    return rows, ids


def _files_of_chunk(place: Path) -> tuple[Path, Path, Path]:
    return place.with_suffix(".keys.npz"), place.with_suffix(".shared.npz"), place.with_suffix(".rows.npz")


def _chunks(files: Sequence[FileSegments], scratch: Path, *, is_test_set: bool) -> list[Chunk]:
    name = "test" if is_test_set else "part"  # as earlier versions named the files, with which a search continues
    divisions = [
        stretches
        for each in by_part(files)
        if (size := size_of_text(each))
        for stretches in divided(each, -(-size // CHUNK_BYTES))
    ]
    places = [scratch / f"{name}-{number:05d}" for number in range(len(divisions))]
    return [
        Chunk(stretches, *_files_of_chunk(place), is_test_set)
        for place, stretches in zip(places, divisions, strict=True)
    ]


def _work(function: str, jobs: list[Json], workers: int, progress: Progress, what: str) -> None:
    total = sum(stretch.segment.text_bytes for job in jobs for stretch in job["stretches"])
    for _ in in_processes(f"t5train.data.checks.{function}", jobs, workers, adding(progress, what, total)):
        pass


def _require_scratch(search: Search, files: Sequence[FileSegments], test_sets: Sequence[FileSegments]) -> None:
    """Raise StorageError if there is too little disk space for the keys that are not made yet."""
    passages = sum(each.passages for each in (*files, *test_sets))
    needed = sum(_KEYS_BYTES_A_PASSAGE[each] for each in {"duplicates", *search.kinds}) * passages
    needed += 0 if search.listed is None else _LISTED_BYTES_A_PASSAGE * passages
    if "contaminated" in search.kinds:
        held_out = size_of_text(files) * (1000 - search.rule.split[0]) // 1000 + size_of_text(test_sets)
        needed += _RUN_BYTES_A_TEXT_BYTE * held_out
    made = sum(each.stat().st_size for each in search.scratch.glob("*.npz"))
    require_free_space(search.scratch, max(0, needed - made), "the keys that passages are compared by")
