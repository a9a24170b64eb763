"""The worker processes of the stage of pair shards: they encode pairs, then arrange those of a task in rows.

To start fast, they do not import pydantic or anything that needs it: jobs contain all settings.
"""

import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from t5train.data.pairs.packing import Rows, packed, unpacked
from t5train.data.samples import keyed_random
from t5train.data.vocabulary.document_encoder import DocumentEncoder
from t5train.data.vocabulary.sentencepiece_model import EOS_ID, UNK_ID
from t5train.data.worker_processes import Advance, Json
from t5train.errors import InputError
from t5train.files.atomic import replacing

LENGTHS, IDS, ROWS, CUT, UNIGRAM = "<u4", "<i8", "<i8", "<i8", "<i8"
"""The types of the numbers in the files of these names."""
_PACKING_SEED = 0
_PAIRS_AT_ONCE = 1 << 16
_SHOWN_CHARACTERS = 60


class EncodedPairs(NamedTuple):
    """The ids of pairs one after the other, each source followed by its target, and both by EOS.

    ``lengths`` int64 [n, 2] are the tokens of each source and target.
    """

    tokens: np.ndarray
    lengths: np.ndarray


def encode(encoder: DocumentEncoder, pairs: list[tuple[str, str]]) -> EncodedPairs:
    """Encode pairs of source and target."""
    documents = encoder.encode([text for pair in pairs for text in pair])
    return EncodedPairs(documents.ids, documents.lengths.astype(np.int64).reshape(-1, 2))


def chosen_pairs(pairs: EncodedPairs, numbers: np.ndarray, lengths: np.ndarray) -> EncodedPairs:
    """Return the pairs with these numbers [n], each side cut to ``lengths`` [n, 2] and with EOS at its end."""
    starts = _starts(pairs.lengths.ravel()).reshape(-1, 2)
    tokens = pairs.tokens[spans(starts[numbers].ravel(), lengths.ravel())]
    tokens[np.cumsum(lengths.ravel()) - 1] = EOS_ID
    return EncodedPairs(tokens, lengths)


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the places of ``lengths`` [n] consecutive elements from each of ``starts`` [n] on, int64."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return where each stretch of these lengths starts if one follows the other."""
    starts: np.ndarray = np.cumsum(lengths, dtype=np.int64) - lengths
    return starts


def encode_pairs(job: Json, advance: Advance) -> Json:
    """Encode a stretch of the lines of a file of pairs, and write what ``build_pair_shards`` joins.

    Returns the number of the job, how many pairs were kept, and how many were cut or dropped.
    """
    with open(job["path"], "rb") as file:
        file.seek(job["start"])
        lines = file.read(job["size"]).splitlines()
    pairs = [(pair["source"], pair["target"]) for pair in map(orjson.loads, lines)]
    whole = encode(_encoder(Path(job["spiece"])), pairs)
    row = np.array(job["row"])
    is_longer = (whole.lengths > row).any(axis=1)
    if is_longer.any() and job["too_long"] == "refuse":
        number = int(is_longer.argmax())
        raise InputError(_refusal(job, number, pairs[number][0], whole.lengths[number]))
    numbers = np.flatnonzero(~is_longer) if job["too_long"] == "drop" else np.arange(len(pairs))
    kept = chosen_pairs(whole, numbers, np.minimum(whole.lengths[numbers], row))
    parts = {"tokens": kept.tokens.astype(f"<u{job['bytes_per_token']}"), "lengths": kept.lengths.astype(LENGTHS)}
    parts["ids"] = (job["first"] + numbers).astype(IDS)
    parts["cut"] = whole.lengths[numbers, 1] > row[1]
    for kind, values in parts.items():
        with open(job["parts"][kind], "wb") as part:  # numpy's tofile would not say why a disk refuses
            part.write(np.ascontiguousarray(values).data)
    advance(job["size"])
    return {"number": job["number"], "pairs": len(numbers), "too_long": int(is_longer.sum())}


def _refusal(job: Json, number: int, source: str, lengths: np.ndarray) -> str:
    shown = source if len(source) <= _SHOWN_CHARACTERS else f"{source[:_SHOWN_CHARACTERS]}..."
    return (
        f"pair {job['first'] + number + 1:,} of the {job['split']} split of task {job['task_name']} has a source of "
        f"{lengths[0]:,} and a target of {lengths[1]:,} tokens, but a row has {job['row'][0]:,} and "
        f"{job['row'][1]:,} (pairs.input_tokens, pairs.target_tokens): {shown!r}. Raise these, or set "
        "pairs.too_long=cut or pairs.too_long=drop"
    )


@cache
def _encoder(spiece: Path) -> DocumentEncoder:
    """Load the encoder once per process, for all its stretches."""
    return DocumentEncoder(spiece)


def arrange_pairs(job: Json, advance: Advance) -> Json:
    """Join the parts of a task in one split, and write its pairs in the order of rows.

    Returns the number of the job, and the counts of what was written.
    """
    lengths = _read(job, "lengths", LENGTHS).reshape(-1, 2)
    ids = _read(job, "ids", IDS)
    is_packed = job["pack"] and len(lengths)
    row, seed = (job["row"][0], job["row"][1]), (_PACKING_SEED, keyed_random.PACKING, job["task"])
    rows = packed(lengths, row, *seed) if is_packed else unpacked(len(lengths))
    with open(job["joined"], "wb") as joined:
        for part in job["parts"]:
            with open(part["tokens"], "rb") as file:
                shutil.copyfileobj(file, joined)
    counts = _write_tokens(job, EncodedPairs(_mapped(Path(job["joined"]), job["bytes_per_token"]), lengths), rows)
    _write(job["files"]["lengths"], lengths[rows.pairs].astype(LENGTHS))
    _write(job["files"]["ids"], ids[rows.pairs])
    cut = np.flatnonzero(_read(job, "cut", "?"))
    if "cut" in job["files"] and len(cut):
        _write(job["files"]["cut"], cut.astype(CUT))
    before = np.zeros((len(lengths) + 1, 2), np.int64)  # tokens of both sides, and of targets
    np.cumsum(np.stack([lengths.sum(axis=1), lengths[:, 1]], axis=1)[rows.pairs], axis=0, out=before[1:])
    _write(job["files"]["rows"], np.column_stack([rows.firsts, before[rows.firsts]]).astype(ROWS))
    advance(len(lengths))
    counts |= {"rows": len(rows.firsts) - 1, "cut_targets": len(cut)}
    return {"number": job["number"], "pairs": len(lengths), **counts}


def _read(job: Json, kind: str, dtype: str) -> np.ndarray:
    """Return what the parts of a task have, as int64."""
    return np.concatenate([np.empty(0, np.int64), *(np.fromfile(part[kind], dtype) for part in job["parts"])])


def _mapped(path: Path, bytes_per_token: int) -> np.ndarray:
    dtype = np.dtype(f"<u{bytes_per_token}")
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _write_tokens(job: Json, pairs: EncodedPairs, rows: Rows) -> dict[str, int]:
    """Write tokens in the order of rows, and for the train split, how often each id occurs in targets."""
    of_sides = np.zeros((3, 2), np.int64)  # tokens, unknown pieces, texts with unknown pieces
    unigram = np.zeros(job["vocab_size"], UNIGRAM)
    starts = _starts(pairs.lengths.sum(axis=1))
    with replacing(Path(job["files"]["tokens"])) as file:
        for first in range(0, len(rows.pairs), _PAIRS_AT_ONCE):
            numbers = rows.pairs[first : first + _PAIRS_AT_ONCE]
            lengths = pairs.lengths[numbers]
            some = pairs.tokens[spans(starts[numbers], lengths.sum(axis=1))]
            file.write(some.data)
            unknown = np.add.reduceat(some == UNK_ID, _starts(lengths.ravel()), dtype=np.int64).reshape(-1, 2)
            of_sides += [lengths.sum(axis=0), unknown.sum(axis=0), (unknown > 0).sum(axis=0)]
            is_target = np.repeat(np.tile([False, True], len(numbers)), lengths.ravel())
            unigram += np.bincount(some[is_target], minlength=len(unigram))
    if "unigram" in job["files"]:
        _write(job["files"]["unigram"], unigram)
    names = ("tokens", "unknown_pieces", "texts_with_unknown")
    return {
        f"{side}{name}": int(count)
        for name, counts in zip(names, of_sides, strict=True)
        for side, count in zip(("source_", ""), counts, strict=True)
    }


def _write(path: str, values: np.ndarray) -> None:
    with replacing(Path(path)) as file:
        file.write(np.ascontiguousarray(values).data)
