"""The shards stage: token ids of a corpus in plain files, the same bytes on any machine.

Shard N is made of consecutive segments of the corpus. It has these files (all numbers are little-endian):

- ``{split}-NNNNN.bin`` for each split: token ids, uint16 (uint32 for a large vocabulary); every document ends with EOS.
- ``{split}-NNNNN.len`` for each split: the number of tokens of each document, EOS included, uint32.
- ``train-NNNNN.unigram``: how often each id of the vocabulary occurs in the train split, int64.
- ``shard-NNNNN.json``, written last: a description of the other files.

After an interruption, only shards that do not match their description are made again. ``held-out-passages.json`` holds
some texts of the validation split with their ids, for the certificate, and ``settings.json`` the settings of text and
shards: whoever trains on the folder alone learns from it what the text is.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.data.checks.unchanged_files import TextStamps, require_recorded
from t5train.data.corpus import corpus_name
from t5train.data.passages import ID_RULE, SPLITS, Passage, SourceFile, SplitRule, split_of
from t5train.data.segments import FileSegments, Stretch, by_part, divided, passages_of, read_segments, size_of_text
from t5train.data.vocabulary.document_encoder import warn_if_slow
from t5train.data.vocabulary.held_out import HELD_OUT, comparable, warn_of_ties, write_held_out
from t5train.data.vocabulary.sentencepiece_model import EOS_ID, PAD_ID, Encoder
from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON
from t5train.data.vocabulary.unknown_pieces import (
    UNIGRAM_DTYPE,
    UnknownPieces,
    recorded_unknown,
    require_known,
    require_known_in,
    unigram_name,
    unknown_in,
)
from t5train.data.worker_processes import Advance, Json, Workers, in_processes
from t5train.errors import DigestMismatch, InputError, RecordError
from t5train.files.atomic import write_json
from t5train.files.output_folder import making, stage_folder
from t5train.host_resources import num_cores, require_space
from t5train.progress import Progress, adding, silent
from t5train.records.changed_files import keep_changed_files
from t5train.records.digests import FileDigest, digest_file, digest_files, verify_file
from t5train.records.identity import fingerprint
from t5train.records.stage_records import (
    HELD_OUT_LEFT_OUT,
    MANIFEST,
    REMOVED,
    REPEATED,
    Corpus,
    TokenizerFiles,
    TokenShards,
    reusable,
)
from t5train.spec import NUM_SENTINELS, CorpusSpec, ShardsSpec

_STAGE_VERSION = 3  # incremented when the same inputs would give other bytes
TEXT_BYTES_PER_TOKEN = 4  # about that of English in T5's vocabulary; decides where shards end
SETTINGS = "settings.json"
_SHARDS_WITH_PASSAGES, _TEXTS_WITH_PASSAGES, _PASSAGES_A_SHARD = 4, 8, 250
_log = logging.getLogger(__name__)


class SplitCounts(BaseModel):
    """The number of documents and tokens of one split in a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    documents: int
    tokens: int


class ShardDescription(BaseModel):
    """The content of ``shard-NNNNN.json``, which marks a shard as complete.

    ``source`` lists [file name, first row, number of rows], and ``part`` is which of the texts of a mixture that is.
    ``id_rule`` is how the ids that decide the splits are spelled; earlier versions did not record it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    fingerprint: str
    id_rule: int = 1
    part: int = 0
    source: list[tuple[str, int, int]]
    splits: dict[str, SplitCounts]
    files: dict[str, FileDigest]


def build_shards(  # noqa: PLR0913 - two specs, two records, and where and how they become a third one
    spec: ShardsSpec,
    corpus_spec: CorpusSpec,
    corpus: Corpus,
    tokenizer: TokenizerFiles,
    root: Path,
    progress: Progress = silent,
    *,
    out: Path | None = None,
    workers: Workers | None = None,
) -> TokenShards:
    """Convert the text to files of token ids: flat arrays of uint16 (uint32 for a large vocabulary).

    Each shard has one such file per split. Finished shards are reused, also after an interruption.

    Args:
        spec: Tokens per shard, and the number of processes.
        corpus_spec: The spec of ``corpus``, which determines its splits.
        corpus: The text.
        tokenizer: The vocabulary.
        root: The root folder.
        progress: Called with the number of bytes of text tokenised so far.
        out: Folder of the result; ``{root}/shards/{name}-{first 12 digits of the fingerprint}`` if left out.
        workers: Who makes the shards. None: ``spec.workers`` processes of this machine, whatever ``spec.executor`` is.

    Returns:
        The record of the shards; its counts are documents and tokens of each split, and the size of the vocabulary.

    Raises:
        InputError: A source file can no longer be read, or was changed meanwhile; or more than the share
            ``spec.max_unknown_share`` of the tokens to train on are unknown. Finished shards of an earlier version are
            reused with a warning.
        StorageError: The folder is too small, cannot be written or holds something else.
        WorkerLost: A worker process was killed.

    """
    inputs = {"corpus": corpus.fingerprint, "tokenizer": tokenizer.files[SPIECE].sha256}
    settings = spec.identity() | corpus_spec.split_identity()
    identity = fingerprint({"kind": "shards", "stage": _STAGE_VERSION, "settings": settings, "inputs": inputs})
    folder = out or _folder(root, corpus_spec, identity)
    with making(folder, identity):
        if found := reusable(TokenShards, folder, identity, progress):
            require_known_in(found, spec.max_unknown_share)
            warn_of_ties(found.counts)
            return found
        keep_changed_files(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        plan = plan_shards(read_segments(corpus.path), spec.shard_tokens)
        stamps = TextStamps(folder, (stretch.path for stretches in plan for stretch in stretches))
        _discard_made_of(folder, plan, stamps.changed())
        common = {
            "folder": str(folder.absolute()),
            "fingerprint": identity,
            "spiece": str((tokenizer.path / SPIECE).absolute()),
            "bytes_per_token": bytes_per_token(tokenizer),
            "vocab_size": int(tokenizer.counts["vocab_size"]),
            "unigram_dtype": UNIGRAM_DTYPE,
            **corpus_spec.split_identity(),
        }
        missing = [number for number in range(len(plan)) if not _is_whole(folder, number, identity)]
        jobs = [
            common
            | {
                "number": number,
                "description": shard_name(number),
                "files": _file_names(number),
                "unigram": unigram_name(number),
                "stretches": plan[number],
            }
            for number in missing
        ]
        _log.info("shards to make: %d of %d", len(jobs), len(plan))
        tokens = sum(_text_bytes(job) for job in jobs) // TEXT_BYTES_PER_TOKEN
        require_space(folder, tokens * bytes_per_token(tokenizer), "the token shards")
        stamps.keep()
        unknown = UnknownPieces(plan, tokenizer.path / SPIECE, spec.max_unknown_share)
        for number in sorted({*range(len(plan))} - {*missing}):
            unknown.add(number, read_description(folder, number).splits["train"].tokens, unknown_in(folder, number))
        _make(jobs, workers or _processes_here(spec), progress, unknown)
        _require_unchanged_text(folder, plan, stamps.changed(), corpus)
        counts = unknown.counts()
        require_known(counts, spec.max_unknown_share)
        counts = recorded_unknown(counts) | _record_held_out(folder, plan, corpus_spec, tokenizer)
        stamps.forget()
        write_json(folder / SETTINGS, {"corpus": corpus_spec.identity(), "shards": spec.identity()})
        return _committed(folder, identity, len(plan), corpus, tokenizer, counts)


def are_made(root: Path, corpus_spec: CorpusSpec, identity: str) -> bool:
    """Whether ``build_shards`` would find shards with this fingerprint finished. Only sizes of files are compared."""
    folder = _folder(root, corpus_spec, identity)
    try:
        found = TokenShards.load(folder)
        are_there = all((folder / name).stat().st_size == digest.size for name, digest in found.files.items())
    except (RecordError, FileNotFoundError):
        return False
    return are_there and found.fingerprint == identity


def _folder(root: Path, corpus_spec: CorpusSpec, identity: str) -> Path:
    return stage_folder(root, "shards", corpus_name(corpus_spec), identity)


def _discard_made_of(folder: Path, plan: list[list[Stretch]], changed: Collection[str]) -> None:
    """Let shards that were made of changed files not count."""
    for number, stretches in enumerate(plan):
        if any(stretch.path in changed for stretch in stretches):
            (folder / shard_name(number)).unlink(missing_ok=True)


def _require_unchanged_text(folder: Path, plan: list[list[Stretch]], changed: Collection[str], corpus: Corpus) -> None:
    """Raise InputError if files that were changed meanwhile are not those that the corpus records."""
    try:
        require_recorded(changed, corpus.files)
    except InputError:
        _discard_made_of(folder, plan, changed)
        raise


def settings_of(shards: TokenShards) -> dict[str, Any]:
    """Return the settings ``part.key`` of text and shards that they were made with.

    Empty if they were made by an earlier version, which did not record them. Raises DigestMismatch if that record was
    changed.
    """
    if SETTINGS not in shards.files:
        return {}
    verify_file(shards.path / SETTINGS, shards.files[SETTINGS])
    parts = json.loads((shards.path / SETTINGS).read_bytes())
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def plan_shards(files: Sequence[FileSegments], shard_tokens: int) -> list[list[Stretch]]:
    """Distribute consecutive segments evenly over as many shards as ``shard_tokens`` requires.

    Each shard holds one text of a mixture only.
    """
    size = shard_tokens * TEXT_BYTES_PER_TOKEN
    return [stretches for each in by_part(files) for stretches in divided(each, round(size_of_text(each) / size))]


def shard_name(number: int) -> str:
    """Return the name of the description of shard ``number``."""
    return f"shard-{number:05d}.json"


def tokens_name(split: str, number: int) -> str:
    """Return the name of the file with the tokens of a split in shard ``number``."""
    return f"{split}-{number:05d}.bin"


def lengths_name(split: str, number: int) -> str:
    """Return the name of the file with the lengths of a split's documents in shard ``number``."""
    return f"{split}-{number:05d}.len"


def read_description(folder: Path, number: int) -> ShardDescription:
    """Read the description of a shard."""
    return ShardDescription.model_validate_json((folder / shard_name(number)).read_bytes())


def _file_names(number: int) -> dict[str, tuple[str, str]]:
    """Return the names of the file of tokens and the file of lengths, by split."""
    return {split: (tokens_name(split, number), lengths_name(split, number)) for split in SPLITS}


def bytes_per_token(tokenizer: TokenizerFiles) -> int:
    """Return the size of an id in shards."""
    return 2 if tokenizer.counts["vocab_size"] <= 1 << 16 else 4


def _is_whole(folder: Path, number: int, identity: str) -> bool:
    """Return whether a shard exists, matches its description and is split by ids as spelled now. Damage is logged.

    Other shards of the same text would be split by other ids: a document could be in two splits, or in none.
    """
    try:
        description = read_description(folder, number)
        for name, digest in description.files.items():
            verify_file(folder / name, digest)
    except FileNotFoundError:
        return False
    except (ValidationError, DigestMismatch) as error:
        _log.warning("making shard %d again, because its files are damaged: %s", number, error)
        return False
    return description.fingerprint == identity and description.id_rule == ID_RULE


def _processes_here(spec: ShardsSpec) -> Workers:
    """Return worker processes of this machine."""

    def work(function: str, jobs: Sequence[Json], advance: Advance) -> Iterator[Json]:
        if jobs:
            warn_if_slow()
        return in_processes(function, jobs, spec.workers or num_cores(), advance)

    return work


def _make(jobs: list[Json], workers: Workers, progress: Progress, unknown: UnknownPieces) -> None:
    advance = adding(progress, "bytes of text tokenised", sum(_text_bytes(job) for job in jobs))
    for made in workers("t5train.data.shard_worker:write_shard", jobs, advance):
        unknown.add(**made)


def _text_bytes(job: Json) -> int:
    return sum(stretch.segment.text_bytes for stretch in job["stretches"])


def _record_held_out(
    folder: Path, plan: list[list[Stretch]], rule: SplitRule, tokenizer: TokenizerFiles
) -> dict[str, int]:
    """Record held-out passages from a few shards that are spread over the corpus, and of each text of a mixture.

    Returns the counts of ``write_held_out``, and how many passages were left out.
    """
    spread = range(0, len(plan), -(-len(plan) // _SHARDS_WITH_PASSAGES))
    parts = [stretches[0].part for stretches in plan]
    numbers = sorted({*spread, *map(parts.index, range(min(1 + parts[-1], _TEXTS_WITH_PASSAGES)))})
    dtype, encoder = np.dtype(f"<u{bytes_per_token(tokenizer)}"), Encoder(tokenizer.path / SPIECE)
    documents = (_validation_documents(folder, number, plan[number], rule, dtype) for number in numbers)
    left_out = Counter({HELD_OUT_LEFT_OUT: 0})
    found = (
        passage for each in documents for passage in islice(comparable(each, encoder, left_out), _PASSAGES_A_SHARD)
    )
    return write_held_out(folder, found, tokenizer.path / TOKENIZER_JSON) | left_out


def _validation_documents(
    folder: Path, number: int, stretches: list[Stretch], rule: SplitRule, dtype: np.dtype
) -> Iterator[tuple[Passage, np.ndarray]]:
    """Yield the validation passages of a shard, each with its ids. Raises InputError if they are not as many."""
    tokens = np.fromfile(folder / tokens_name("validation", number), dtype)
    ends = np.cumsum(np.fromfile(folder / lengths_name("validation", number), "<u4"), dtype=np.int64)
    passages = (
        passage
        for stretch in stretches
        for passage in passages_of(SourceFile(Path(stretch.path), stretch.name), stretch.segment)
        if split_of(rule, passage.id) == "validation"
    )
    try:
        for passage, end, start in zip(passages, ends, [0, *ends][: len(ends)], strict=True):
            yield passage, tokens[start:end]
    except ValueError:  # of zip
        raise InputError(
            f"shard {number} in {folder} does not have as many validation documents as the text it is made of. Remove "
            "the folder of the shards and start again: they are then made again"
        ) from None


def _committed(
    folder: Path, identity: str, num_shards: int, corpus: Corpus, tokenizer: TokenizerFiles, counts: dict[str, int]
) -> TokenShards:
    files: dict[str, FileDigest] = {}
    for number in range(num_shards):
        files |= read_description(folder, number).files
        files[shard_name(number)] = digest_file(folder / shard_name(number))
    files |= digest_files(folder, [HELD_OUT, SETTINGS])
    return TokenShards(
        path=folder,
        fingerprint=identity,
        inputs={
            "corpus": corpus.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "vocabulary": tokenizer.files[SPIECE].sha256,
        },
        files=files,
        counts={
            **vocabulary_counts(tokenizer),
            **_totals(folder, num_shards),
            **{name: count for name, count in corpus.counts.items() if name in {REPEATED, REMOVED}},
            "num_shards": num_shards,
            **counts,
        },
    ).commit()


def vocabulary_counts(tokenizer: TokenizerFiles) -> dict[str, int]:
    """Return the counts of shards that follow from the vocabulary."""
    vocab_size = int(tokenizer.counts["vocab_size"])
    return {
        "vocab_size": vocab_size,
        "pad_id": PAD_ID,
        "eos_id": EOS_ID,
        "first_sentinel_id": vocab_size - 1,
        "num_sentinels": NUM_SENTINELS,
        "bytes_per_token": bytes_per_token(tokenizer),
    }


def _totals(folder: Path, num_shards: int) -> dict[str, int]:
    totals = {f"{split}_{unit}": 0 for split in SPLITS for unit in ("tokens", "documents")}
    for number in range(num_shards):
        for split, counts in read_description(folder, number).splits.items():
            totals[f"{split}_tokens"] += counts.tokens
            totals[f"{split}_documents"] += counts.documents
    return totals
