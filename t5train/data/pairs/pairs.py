"""The stage of pairs: find the files, verify and split their pairs, and write these to files of its own.

The split of a pair depends on its normalised source, so that equal sources are never in two splits, whatever the order
of files and whatever the task. If a split has files of its own, all others are trained on, and a source that is in both
is counted (contaminated). So is a pair to train on that a task of the other direction, which reads the same file with
source and target swapped, holds out: the model would have seen the answer.
"""

import json
import logging
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import orjson
from xxhash import xxh3_64_intdigest

from t5train.data.checks.unchanged_files import content_of, digests_of, require_unchanged, stamps_of
from t5train.data.pairs.pair_reading import PairRow, pair_rows
from t5train.data.pairs.pair_sources import GENERATED_VERSION, TaskFiles, generated_pairs, task_files
from t5train.data.passages import ODDITIES, SPLITS, SourceFile, Split, split_of
from t5train.data.readers import OpenFile
from t5train.errors import InputError
from t5train.files.atomic import replacing, write_json
from t5train.files.output_folder import making, stage_folder
from t5train.host_resources import require_free_space, require_writable
from t5train.progress import Progress, silent
from t5train.quantities import quantity
from t5train.records.changed_files import keep_changed_files
from t5train.records.digests import FileDigest, digest_files
from t5train.records.identity import fingerprint
from t5train.records.stage_records import Pairs, reusable
from t5train.spec import PairsSpec
from t5train.spec.pairs_spec import GENERATED

TASKS = "tasks.json"
_STAGE_VERSION = 1  # incremented when the same files would give other pairs
_REPORT_ROWS = 2048
_ORDER: tuple[Split, ...] = ("test", "validation", "train")
"""In which files are read: those of each split after those that its sources are looked for in."""
_FINDINGS = (
    "empty_pairs",
    "doubled_prefixes",
    "contaminated_pairs",
    "validation_pairs_in_test",
    "duplicate_pairs",
    "indistinct_tasks",
    *ODDITIES,
)
"""The counts of what may be wrong with the pairs of a task."""
_COUNTS = (*(f"{split}_pairs" for split in SPLITS), "read_pairs", "removed_pairs", *_FINDINGS)
_PERHAPS_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd<]")
"""Finds all texts with ``ODDITIES`` and few others. One set of characters is looked for several times as fast."""
_log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """What the model reads, with the task's prefix, and what it is to write."""

    source: str
    target: str


class Task(NamedTuple):
    """A task, and the prefix that its sources begin with."""

    task: str
    prefix: str


def build_pairs(spec: PairsSpec, root: Path, progress: Progress = silent, *, out: Path | None = None) -> Pairs:
    """Read all files of pairs, verify and split them, and write the pairs of each split and task. A result is reused.

    Local files are read in place, and remote ones are downloaded to ``{root}/cache``. The fingerprint depends on the
    content of the files, and on the settings that decide which pairs there are in each split.

    Args:
        spec: The files of each task, and how their pairs are split.
        root: The root folder.
        progress: Called with the number of files hashed, then with the number of bytes read (as stored on disk).
        out: Folder of the result; ``{root}/pairs/{name}-{first 12 digits of the fingerprint}`` if left out.

    Returns:
        The record of the pairs. Its counts are ``tasks``, and of each split the pairs (``train_pairs``), all and of
        each task (``train_pairs_of_task_0``); and likewise what ``finding_lines`` is about.

    Raises:
        InputError: A file is missing, malformed, truncated or not UTF-8, or was changed meanwhile; a column is missing
            or holds no text; or a task has no pair to train on or to validate with.
        StorageError: The folder cannot be written, or holds something else.

    """
    require_writable(out or root)  # before hashing, which takes long for many pairs
    tasks = task_files(spec, root, progress)
    require_columns(tasks)
    files = list(dict.fromkeys(file for task in tasks for file in task.files))
    stamps, digests = stamps_of(files), digests_of(files, progress)
    identity = _identity(spec, tasks, digests)
    folder = out or stage_folder(root, "pairs", _name(spec), identity)
    with making(folder, identity):
        if (record := reusable(Pairs, folder, identity, progress)) is None:
            keep_changed_files(folder)
            stored = sum(digests[file].size for task in tasks for file in task.files)
            require_free_space(folder, stored, "the pairs")
            counts = _Writing(spec, folder, tasks, progress).write()
            require_unchanged(stamps, digests)
            write_json(folder / TASKS, [Task(each.task, each.prefix)._asdict() for each in spec.tasks()])
            names = [pairs_name(split, number) for number in range(len(spec.train)) for split in SPLITS]
            recorded = digest_files(folder, [TASKS, *names])
            record = Pairs(path=folder, fingerprint=identity, files=recorded, counts=counts).commit()
    for line in finding_lines(record):
        _log.warning("%s", line)
    if removed := record.counts["removed_pairs"]:
        _log.info("removed %s from training (pairs.remove)", quantity(removed, "pair"))
    return record


def require_columns(tasks: Iterable[TaskFiles]) -> None:
    """Raise InputError if the beginning of a file cannot be read as pairs, which takes no time to find out."""
    for task in tasks:
        for file in task.files:
            with OpenFile() as opened:
                next(pair_rows(file, task.source, opened), None)


def pairs_name(split: str, task: int) -> str:
    """Return the name of the file with the pairs of a split and task: one JSON object a line."""
    return f"{split}-{task:03d}.jsonl"


def read_pairs(pairs: Pairs, split: str, task: int) -> Iterator[Pair]:
    """Yield the pairs of a split and task, in the order of its files."""
    with open(pairs.path / pairs_name(split, task), "rb") as file:
        for line in file:
            yield Pair(**orjson.loads(line))


def tasks_of(pairs: Pairs) -> list[Task]:
    """Return the tasks, in the order of ``pairs.train``."""
    return [Task(**each) for each in json.loads((pairs.path / TASKS).read_bytes())]


def count_of(pairs: Pairs, name: str, task: int) -> int:
    """Return a count of a task, such as ``train_pairs`` or ``duplicate_pairs``."""
    return pairs.counts[_of_task(name, task)]


def finding_lines(pairs: Pairs) -> list[str]:
    """Return a warning for each thing that may be wrong with the pairs of a task."""
    lines = list[str]()
    for number, task in enumerate(tasks_of(pairs)):
        count = {name: count_of(pairs, name, number) for name in (*_FINDINGS, "read_pairs", "train_pairs")}
        said = {
            "empty_pairs": f"of {count['read_pairs']:,} pairs have an empty source or target, and are skipped",
            "doubled_prefixes": f"of {count['read_pairs']:,} sources begin with the prefix {task.prefix!r} in their "
            "files already, so they have it twice: remove it from the files, or from the setting (#prefix=)",
            "contaminated_pairs": "pairs of pairs.train have a source that is also in pairs.validation or pairs.test, "
            "or are held out of the task of the other direction, which makes results look better than they are: set "
            "pairs.remove=contaminated",
            "validation_pairs_in_test": "pairs of pairs.validation have a source that is also in pairs.test, so the "
            "best checkpoint would be chosen by what it is tested on: remove them from one of the two",
            "duplicate_pairs": f"of {count['train_pairs']:,} pairs to train on repeat an earlier one",
            "indistinct_tasks": "of the other tasks cannot be told apart from it, as sources of both begin alike: give "
            "each task a prefix of its own (#prefix=)",
            **{name: f"of {count['read_pairs']:,} pairs have {ODDITIES[name].explanation}" for name in ODDITIES},
        }
        lines += [f"task {task.task!r}: {count[name]:,} {line}" for name, line in said.items() if count[name]]
    return lines


def normalised(source: str) -> str:
    """Return a source without what does not make it another one: case, white space, and the form of Unicode."""
    if not source.isascii():
        source = unicodedata.normalize("NFD", source)
    source = " ".join(source.casefold().split())
    return source if source.isascii() else unicodedata.normalize("NFC", source)


def _of_task(name: str, task: int) -> str:
    return f"{name}_of_task_{task}"


def _name(spec: PairsSpec) -> str:
    """Return a folder name derived from the names of the tasks."""
    name = "-".join(each.task for each in spec.tasks())
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40].strip("-") or "pairs"


def _identity(spec: PairsSpec, tasks: Sequence[TaskFiles], digests: Mapping[SourceFile, FileDigest]) -> str:
    identified = [
        {"task": source.task, "prefix": source.prefix, "columns": [source.source, source.target], "split": split}
        | {"files": content_of({file: digests[file] for file in files})}
        | ({"made": source.location, "version": GENERATED_VERSION} if source.location in GENERATED else {})
        for _, split, source, files in tasks
    ]
    rule = {"split": list(spec.split), "split_seed": spec.split_seed, "remove": spec.remove}
    return fingerprint({"kind": "pairs", "stage": _STAGE_VERSION, "tasks": identified, **rule})


class _Rule(NamedTuple):
    """How pairs of ``pairs.train`` are split."""

    split: tuple[int, int, int]
    split_seed: int


class _Writing:
    """Writes the pairs of all tasks, one after another, and counts them."""

    def __init__(self, spec: PairsSpec, folder: Path, tasks: Sequence[TaskFiles], progress: Progress) -> None:
        self._spec, self._folder, self._tasks, self._progress = spec, folder, tasks, progress
        self._rule = _Rule(spec.shares(), spec.split_seed)
        self._total_bytes = sum(file.path.stat().st_size for task in tasks for file in task.files)
        self._done_bytes = 0

    def write(self) -> dict[str, int]:
        """Write the files of each split and task, and return the counts of the record."""
        numbers = range(len(self._spec.train))
        found = [self._task([each for each in self._tasks if each.number == number]) for number in numbers]
        beginnings = [each.beginning for each in found]
        counts = {"tasks": len(found)}
        for number, each in enumerate(found):
            each.counts["indistinct_tasks"] = _alike(number, beginnings)
            for name in _COUNTS:
                counts[name] = counts.get(name, 0) + each.counts[name]
                counts[_of_task(name, number)] = each.counts[name]
        return counts

    def _task(self, sources: Sequence[TaskFiles]) -> "_TaskPairs":
        number, removes = sources[0].number, self._spec.remove != "none"
        has_reverse = any(_is_reverse(sources[0], other) for other in self._tasks)
        with ExitStack() as stack:
            places = {split: self._folder / pairs_name(split, number) for split in SPLITS}
            out = {split: stack.enter_context(replacing(place)) for split, place in places.items()}
            task = _TaskPairs(sources[0].source.prefix, self._rule, out, removes=removes, has_reverse=has_reverse)
            for source in sorted(sources, key=lambda each: _ORDER.index(each.split)):
                for row in self._rows(source):
                    task.add(source.split, row)
        task.counts["duplicate_pairs"] = task.duplicates()
        self._require_pairs(sources[0].source.task, task.counts)
        return task

    def _rows(self, task: TaskFiles) -> Iterator[PairRow]:
        if task.source.location in GENERATED:
            for number, (source, target) in enumerate(generated_pairs(task.source.location)):
                yield PairRow(f"pair {number}", source, target)
        for file in task.files:
            with OpenFile() as opened:
                for number, row in enumerate(pair_rows(file, task.source, opened)):
                    if number % _REPORT_ROWS == 0:
                        self._report(opened.stored_bytes_read)
                    yield row
            self._done_bytes += file.path.stat().st_size
            self._report(0)

    def _report(self, more: int) -> None:
        self._progress("bytes of pairs read", self._done_bytes + more, self._total_bytes)

    def _require_pairs(self, task: str, counts: Mapping[str, int]) -> None:
        """Raise InputError if a task has no pairs for a split that needs some."""
        given: dict[Split, Any] = {split: getattr(self._spec, split) for split in SPLITS}
        if not counts["read_pairs"]:
            raise InputError(f"the files of task {task!r} have no pairs. Name files with pairs in pairs.train")
        left_out = f"of {quantity(counts['read_pairs'], 'pair')}, {counts['empty_pairs']:,} are empty"
        left_out += f" and {counts['removed_pairs']:,} removed (pairs.remove)" if counts["removed_pairs"] else ""
        for split in SPLITS:
            if counts[f"{split}_pairs"] or (split == "test" and not given[split]):
                continue
            remedy = f"Name files with pairs in pairs.{split}"
            if split != "train" and not given[split]:
                remedy = f"Add pairs, raise the share of {split} (pairs.split), or name files in pairs.{split}"
            raise InputError(f"task {task!r} has no pairs in the {split} split: {left_out}. {remedy}")


class _TaskPairs:
    """The pairs of a task, written as they are added."""

    def __init__(
        self, prefix: str, rule: _Rule, out: Mapping[Split, IO[bytes]], *, removes: bool, has_reverse: bool
    ) -> None:
        self._prefix, self._rule, self._out, self._removes, self._has_reverse = prefix, rule, out, removes, has_reverse
        self.counts = Counter[str]()
        self.beginning: str | None = None
        """What all sources to train on begin with; None before the first."""
        self._held_out: dict[Split, set[int]] = {"validation": set(), "test": set()}
        self._trained = array("Q")

    def add(self, split: Split, row: PairRow) -> None:
        """Write a pair of the files of a split, which come in ``_ORDER``."""
        self.counts["read_pairs"] += 1
        if not row.source.strip() or not row.target.strip():
            self.counts["empty_pairs"] += 1
            return
        is_doubled = bool(self._prefix) and row.source.startswith(self._prefix)
        if is_doubled:
            self.counts["doubled_prefixes"] += 1
        key = normalised(row.source.removeprefix(self._prefix))
        source = xxh3_64_intdigest(key.encode())
        if split != "train":
            self._held_out[split].add(source)
            self.counts["validation_pairs_in_test"] += split == "validation" and source in self._held_out["test"]
        else:
            is_known = any(source in sources for sources in self._held_out.values())
            split = split_of(self._rule, key)
            is_known = is_known or (split == "train" and self._is_held_out_in_reverse(row.target))
            if is_known:
                self.counts["removed_pairs" if self._removes else "contaminated_pairs"] += 1
                if self._removes:
                    return
        if _PERHAPS_ODD.search(row.source) or _PERHAPS_ODD.search(row.target):
            self._note_oddities(f"{row.source}\n{row.target}".encode())
        self._write(split, Pair(self._prefix + row.source, row.target))

    def _is_held_out_in_reverse(self, target: str) -> bool:
        return self._has_reverse and split_of(self._rule, normalised(target)) != "train"

    def _note_oddities(self, text: bytes) -> None:
        for name, oddity in ODDITIES.items():
            self.counts[name] += oddity.pattern.search(text) is not None

    def _write(self, split: Split, pair: Pair) -> None:
        line = orjson.dumps({"source": pair.source, "target": pair.target})
        self._out[split].write(line + b"\n")
        self.counts[f"{split}_pairs"] += 1
        if split == "train":
            self._trained.append(xxh3_64_intdigest(line))
            self.beginning = pair.source if self.beginning is None else _common(self.beginning, pair.source)

    def duplicates(self) -> int:
        """Return how many pairs to train on are equal to an earlier one."""
        return len(self._trained) - len(np.unique(np.frombuffer(self._trained, np.uint64)))


def _is_reverse(task: TaskFiles, other: TaskFiles) -> bool:
    """Return whether a task reads a file of another one with source and target swapped."""
    is_swapped = (task.source.source, task.source.target) == (other.source.target, other.source.source)
    return is_swapped and task.split == other.split and not set(task.files).isdisjoint(other.files)


def _common(beginning: str, source: str) -> str:
    """Return what two texts begin with."""
    if source.startswith(beginning):
        return beginning
    return beginning[: next(at for at, each in enumerate(beginning) if source[at : at + 1] != each)]


def _alike(number: int, beginnings: Sequence[str | None]) -> int:
    """Return how many other tasks have sources with the common beginning of those of a task."""
    own = beginnings[number] or ""
    return sum((each or "").startswith(own) for place, each in enumerate(beginnings) if place != number)
