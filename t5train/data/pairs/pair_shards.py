"""The stage of pair shards: token ids of pairs in plain files, in the order of the rows of batches.

There is one shard for each task. Shard N has these files (all numbers are little-endian), where split is train,
validation or test:

- ``{split}-NNNNN.tokens``: ids, uint16 (uint32 for a large vocabulary). A source, its target, the next source and so
  on; each ends with EOS.
- ``{split}-NNNNN.lengths``: the number of tokens of each source and target, EOS included, uint32 [pairs, 2].
- ``{split}-NNNNN.ids``: the number of each pair in its file of pairs, from 0, int64 [pairs]. It does not depend on how
  pairs are packed.
- ``{split}-NNNNN.rows``: what is before each row, and before the end: pairs, tokens, and tokens of targets, int64
  [rows + 1, 3].
- ``{split}-NNNNN.cut``, of validation and test, if there are any: the numbers of the rows whose target was cut, int64.
- ``train-NNNNN.unigram``: how often each id of the vocabulary occurs in targets, int64.

Rows to train on are packed (unless ``pairs.pack`` is false); a row of another split is one pair, in the order of the
file of pairs. ``tasks.json`` is that of the pairs. ``held-out-passages.json`` has sources and targets to validate on
with their ids, for the certificate.

``counts`` in the manifest, of each split and, with ``_of_task_N``, of each task in it: ``pairs``, ``rows``, ``tokens``
(of targets), ``source_tokens``, ``cut`` and ``dropped`` (pairs that were longer than a row), ``cut_targets`` (of those
cut, pairs with a longer target), ``unknown_pieces`` and ``texts_with_unknown`` (targets with one, whose text no model
can give), and these two with ``source_``.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

from t5train.data.pairs.pairs import TASKS, Task, pairs_name, read_pairs, tasks_of
from t5train.data.passages import SPLITS, Passage
from t5train.data.shards import bytes_per_token, vocabulary_counts
from t5train.data.vocabulary.document_encoder import warn_if_slow
from t5train.data.vocabulary.held_out import HELD_OUT, comparable, warn_of_ties, write_held_out
from t5train.data.vocabulary.sentencepiece_model import Encoder
from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON
from t5train.data.vocabulary.unknown_pieces import (
    lacked_characters,
    lacked_counts,
    require_known,
    unigram_name,
    unknown_line,
)
from t5train.data.worker_processes import Json, in_processes
from t5train.errors import InputError
from t5train.files.atomic import write_text
from t5train.files.output_folder import making, stage_folder
from t5train.host_resources import num_cores, require_space
from t5train.progress import Progress, adding, silent
from t5train.quantities import quantity
from t5train.records.changed_files import keep_changed_files
from t5train.records.digests import digest_files
from t5train.records.identity import fingerprint
from t5train.records.stage_records import (
    HELD_OUT_LEFT_OUT,
    LACKED_CHARACTER,
    MANIFEST,
    TRAIN_TOKENS,
    UNKNOWN_PIECES,
    Pairs,
    PairShards,
    TokenizerFiles,
    reusable,
)
from t5train.spec import PairsSpec

_STAGE_VERSION = 1  # incremented when the same inputs would give other bytes
KINDS = ("tokens", "lengths", "ids", "rows")
"""The files of a split of a task, by the ends of their names."""
PARTS = ("tokens", "lengths", "ids", "cut")
"""What is written of each stretch of pairs before those of a task are joined."""
_WORKER = "t5train.data.pairs.pair_shard_worker"
_STRETCH_BYTES = 4 << 20
_USES = {"train": "train on", "validation": "validate with", "test": "test on"}
_WARNING_SHARE = 0.01
_SAMPLE_PAIRS = 10_000
_PAIRS = 500  # twice as many texts
_log = logging.getLogger(__name__)


class _File(NamedTuple):
    """The pairs of a task in one split."""

    path: Path
    split: str
    task: int
    name: str
    """The name of the task."""


def build_pair_shards(  # noqa: PLR0913 - a spec, two records, and where and how they become a third one
    spec: PairsSpec,
    pairs: Pairs,
    tokenizer: TokenizerFiles,
    root: Path,
    progress: Progress = silent,
    *,
    workers: int | None = None,
    max_unknown_share: float = 0.1,
    out: Path | None = None,
) -> PairShards:
    """Convert pairs to files of token ids, and pack those to train on into rows.

    Args:
        spec: Lengths of rows, and what becomes of longer pairs.
        pairs: The pairs.
        tokenizer: The vocabulary.
        root: The root folder.
        progress: Called with the number of bytes of pairs tokenised so far, then of pairs put in rows.
        workers: The number of processes; one for each core if left out.
        max_unknown_share: The largest share of unknown pieces in the sources, and in the targets, to train on.
        out: Folder of the result; ``{root}/pair-shards/{name}-{first 12 digits of the fingerprint}`` if left out.

    Returns:
        The record of the shards, whose counts the module describes.

    Raises:
        InputError: A prefix fills a row; a pair is longer than a row and ``spec.too_long`` is refuse; all pairs of a
            task in a split were dropped; or more than ``max_unknown_share`` are unknown pieces.
        DigestMismatch: A file of pairs is not as recorded.
        StorageError: The folder is too small, cannot be written or holds something else.
        WorkerLost: A worker process was killed.

    """
    inputs = {"pairs": pairs.fingerprint, "tokenizer": tokenizer.files[SPIECE].sha256}
    row = {"input_tokens": spec.input_tokens, "target_tokens": spec.target_tokens}
    settings = row | {"too_long": spec.too_long, "pack": spec.pack}
    identity = fingerprint({"kind": "pair-shards", "stage": _STAGE_VERSION, "settings": settings, "inputs": inputs})
    name = pairs.path.name.rpartition("-")[0] or "pairs"
    folder = out or stage_folder(root, "pair-shards", name, identity)
    with making(folder, identity):
        found = reusable(PairShards, folder, identity, progress)
        if found and "train_cut_targets" in found.counts:  # a version before did not list them, with equal other files
            _judge(found.counts, task_names(found), max_unknown_share)
            warn_of_ties(found.counts)
            return found
        keep_changed_files(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        pairs.verify(progress)
        require_space(folder, 2 * sum(digest.size for digest in pairs.files.values()), "the pair shards")
        warn_if_slow()
        write_text(folder / TASKS, (pairs.path / TASKS).read_text("utf-8"))
        names = _task_names(folder)
        _require_room(spec, tasks_of(pairs), tokenizer)
        files = [
            _File(pairs.path / pairs_name(split, task), split, task, name)
            for split in SPLITS
            for task, name in enumerate(names)
        ]
        common = {
            "row": list(row.values()),
            "too_long": spec.too_long,
            "pack": spec.pack,
            "spiece": str((tokenizer.path / SPIECE).absolute()),
            "bytes_per_token": bytes_per_token(tokenizer),
            "vocab_size": int(tokenizer.counts["vocab_size"]),
        }
        counts = row | {"num_shards": len(names)} | _made(folder, files, common, workers or num_cores(), progress)
        counts |= _unknown(pairs, counts, len(names), tokenizer)
        _judge(counts, names, max_unknown_share)
        return PairShards(
            path=folder,
            fingerprint=identity,
            inputs={
                "pairs": pairs.fingerprint,
                "tokenizer": tokenizer.fingerprint,
                "vocabulary": tokenizer.files[SPIECE].sha256,
            },
            counts={
                **vocabulary_counts(tokenizer),
                **counts,
                **_record_held_out(folder, pairs, len(names), tokenizer),
            },
            files=digest_files(folder, [HELD_OUT, TASKS, *_written(files, counts)]),
        ).commit()


def _require_room(spec: PairsSpec, tasks: Sequence[Task], tokenizer: TokenizerFiles) -> None:
    """Raise InputError if a prefix leaves no token of a row for a source."""
    encoder = Encoder(tokenizer.path / SPIECE)
    for task, with_eos in zip(tasks, encoder.encode([task.prefix for task in tasks], add_eos=True), strict=True):
        if len(with_eos) >= spec.input_tokens:
            raise InputError(
                f"the prefix of task {task.task} has {len(with_eos) - 1:,} tokens, but a row has {spec.input_tokens:,} "
                "(pairs.input_tokens) with EOS, so nothing of a source would be left. Raise pairs.input_tokens, or "
                "shorten the prefix (#prefix=)"
            )


def task_names(shards: PairShards) -> list[str]:
    """Return the names of the tasks, in order."""
    return _task_names(shards.path)


def _task_names(folder: Path) -> list[str]:
    return [str(task["task"]) for task in json.loads((folder / TASKS).read_bytes())]


def shard_file(split: str, task: int, kind: str) -> str:
    """Return the name of a file of pair shards; ``kind`` is tokens, lengths, ids or rows."""
    return f"{split}-{task:05d}.{kind}"


def _file_names(file: _File) -> dict[str, str]:
    names = {kind: shard_file(file.split, file.task, kind) for kind in KINDS}
    if file.split == "train":
        return names | {"unigram": unigram_name(file.task)}
    return names | {"cut": shard_file(file.split, file.task, "cut")}


def _written(files: Sequence[_File], counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the names of the files that were written, of which those of cut targets may be none."""
    for file in files:
        for kind, name in _file_names(file).items():
            if kind != "cut" or counts[f"{file.split}_cut_targets_of_task_{file.task}"]:
                yield name


def _made(folder: Path, files: list[_File], common: Json, workers: int, progress: Progress) -> dict[str, int]:
    """Make the shards of all tasks, and return the counts of what is in them."""
    with _temporary_files(folder):
        stretches = [stretch for file in files for stretch in _stretches(folder, file)]
        jobs = [common | stretch | {"number": number} for number, stretch in enumerate(stretches)]
        advance = adding(progress, "bytes of pairs tokenised", sum(job["size"] for job in jobs))
        longer, kept = Counter[str](), 0
        for done in in_processes(f"{_WORKER}:encode_pairs", jobs, workers, advance):
            longer[jobs[done["number"]]["path"]] += done["too_long"]
            kept += done["pairs"]
        tasks = [
            common
            | {
                "number": number,
                "task": file.task,
                "pack": common["pack"] and file.split == "train",
                "parts": [job["parts"] for job in jobs if job["path"] == str(file.path)],
                "joined": str(_temporary(folder, file, "joined", 0)),
                "files": {kind: str(folder / name) for kind, name in _file_names(file).items()},
            }
            for number, file in enumerate(files)
        ]
        counts = Counter[str]()
        for done in in_processes(f"{_WORKER}:arrange_pairs", tasks, workers, adding(progress, "pairs arranged", kept)):
            file = files[done.pop("number")]
            too_long = longer[str(file.path)]
            done |= {
                name: too_long if common["too_long"] == how else 0
                for name, how in (("cut", "cut"), ("dropped", "drop"))
            }
            for name, count in done.items():
                counts[f"{file.split}_{name}"] += count
                counts[f"{file.split}_{name}_of_task_{file.task}"] = count
        return dict(counts)


def _stretches(folder: Path, file: _File) -> Iterator[Json]:
    """Yield the part of a job that is about a stretch of whole lines of a file of pairs, for all of the file."""
    start = first = 0
    with open(file.path, "rb") as lines:
        while block := lines.read(_STRETCH_BYTES):
            block += lines.readline()
            yield {
                "path": str(file.path),
                "split": file.split,
                "task_name": file.name,
                "start": start,
                "size": len(block),
                "first": first,
                "parts": {kind: str(_temporary(folder, file, kind, start)) for kind in PARTS},
            }
            start += len(block)
            first += block.count(b"\n")


def _temporary(folder: Path, file: _File, kind: str, start: int) -> Path:
    """Return the path of a file that ``making`` removes if a killed process left it."""
    return folder / f".{file.split}-{file.task:05d}-{start}.{kind}.{'0' * 8}.tmp"


@contextmanager
def _temporary_files(folder: Path) -> Iterator[None]:
    """Remove temporary files at the end."""
    try:
        yield
    finally:
        for left in folder.glob(".*.tmp"):
            left.unlink()


def _unknown(pairs: Pairs, counts: Mapping[str, int], num_tasks: int, tokenizer: TokenizerFiles) -> dict[str, int]:
    """Return the count of unknown pieces in targets to train on, and if they are many, of characters in a sample."""
    found = {UNKNOWN_PIECES: counts["train_unknown_pieces"]}
    if not any(unknown_line(of_side) for of_side in _sides(counts).values()):
        return found
    of_tasks = [
        counts[f"train_unknown_pieces_of_task_{task}"] + counts[f"train_source_unknown_pieces_of_task_{task}"]
        for task in range(num_tasks)
    ]
    encoder, worst = Encoder(tokenizer.path / SPIECE), of_tasks.index(max(of_tasks))
    texts = [text for pair in islice(read_pairs(pairs, "train", worst), _SAMPLE_PAIRS) for text in pair]
    return found | lacked_counts(lacked_characters(texts, encoder.encode(texts), encoder))


def _sides(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the counts of the sources and of the targets to train on, as those of texts."""
    lacked = {name: count for name, count in counts.items() if name.startswith(LACKED_CHARACTER)}
    return {
        f"the {side} to train on": {
            TRAIN_TOKENS: counts[f"train_{prefix}tokens"],
            UNKNOWN_PIECES: counts[f"train_{prefix}unknown_pieces"],
            **lacked,
        }
        for side, prefix in (("sources", "source_"), ("targets", ""))
    }


def _judge(counts: Mapping[str, int], names: Sequence[str], max_unknown_share: float) -> None:
    """Log warnings about unknown pieces and pairs that are longer than a row. Raises InputError if nothing is left."""
    for (task, name), (split, use) in product(enumerate(names), _USES.items()):
        pairs, cut, dropped = (counts[f"{split}_{what}_of_task_{task}"] for what in ("pairs", "cut", "dropped"))
        if not pairs and (dropped or split == "train"):
            raise InputError(
                f"task {name} has no pair to {use}: {quantity(dropped, 'pair')} had a side that is longer than a "
                "row, and pairs.too_long is drop. Raise pairs.input_tokens and pairs.target_tokens, or set "
                "pairs.too_long=cut"
            )
        if cut + dropped > _WARNING_SHARE * (pairs + dropped):
            _log.warning(
                "task %s: %s of %s to %s (%.1f%%) are longer than a row of %d and %d tokens and were %s. If "
                "what is lost matters, raise pairs.input_tokens or pairs.target_tokens",
                name,
                f"{cut + dropped:,}",
                quantity(pairs + dropped, "pair"),
                use,
                100 * (cut + dropped) / (pairs + dropped),
                counts["input_tokens"],
                counts["target_tokens"],
                "cut" if cut else "dropped",
            )
    for side, of_side in _sides(counts).items():
        require_known(of_side, max_unknown_share, side)


def _record_held_out(folder: Path, pairs: Pairs, num_tasks: int, tokenizer: TokenizerFiles) -> dict[str, int]:
    """Record sources and targets of pairs to validate on, of as many tasks as possible.

    Returns the counts of ``write_held_out``, and how many texts were left out.
    """
    encoder, left_out = Encoder(tokenizer.path / SPIECE), Counter({HELD_OUT_LEFT_OUT: 0})
    some = (islice(read_pairs(pairs, "validation", task), _PAIRS // num_tasks + 1) for task in range(num_tasks))
    texts = [text for of_task in some for pair in of_task for text in pair]
    passages = (Passage("", "", text) for text in texts)
    found = comparable(zip(passages, encoder.encode(texts, add_eos=True), strict=True), encoder, left_out)
    return write_held_out(folder, found, tokenizer.path / TOKENIZER_JSON) | left_out
