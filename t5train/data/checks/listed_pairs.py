"""The pairs of near-duplicates in a file of ``data index duplicates``, and which passages of a text they are.

The file states the digests of the files that it was made of: it is read only with a text of the same files.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from t5train.data.segments import FileSegments, rows_in, stretches_of
from t5train.data.worker_processes import Advance, Json
from t5train.errors import InputError
from t5train.files.atomic import replacing
from t5train.files.os_errors import explain
from t5train.quantities import quantity
from t5train.records.digests import FileDigest, digest_file

PAIRS_KIND, PAIRS_VERSION = "near-duplicates", 2
_MAKE_AGAIN = "Make it again with `t5-pretrain data index duplicates`"
_MOST_LINE_BYTES = 64 << 20


class ListedFile(FileDigest):
    """A file that the pairs were found in."""

    name: str


class PairSearch(BaseModel):
    """How the pairs were found; docs/reference/json.md explains the numbers."""

    model_config = ConfigDict(frozen=True)
    source: str
    index: str | None
    """The index that was given. None: one was built."""
    neighbours: int
    cosine: float
    text: float
    candidates: int
    pairs: int
    groups: int


class ListedSearch(PairSearch):
    """The same, and which file has the pairs."""

    model_config = ConfigDict(extra="forbid")
    sha256: str
    """Of the file."""


class _Header(PairSearch):
    kind: Literal["near-duplicates"]
    schema_version: Literal[2]
    files: list[ListedFile]


class Listed(NamedTuple):
    """A file of pairs whose first line was read."""

    path: Path
    sha256: str
    header: _Header

    def search(self) -> ListedSearch:
        """Return how the pairs were found."""
        facts = {name: getattr(self.header, name) for name in PairSearch.model_fields}
        return ListedSearch(**facts, sha256=self.sha256)

    def require_text(self, sizes: Mapping[str, int | None], sha256s: Mapping[str, str] | None = None) -> None:
        """Raise InputError unless the pairs were found in files of these names, sizes (if known) and digests."""
        listed = {each.name: each for each in self.header.files}
        for name in sorted({*listed, *sizes}):
            if name not in listed:
                difference = f"it was not made of {name}, which corpus.source includes"
            elif name not in sizes:
                difference = f"it was also made of {name}, which corpus.source does not include"
            elif sizes[name] not in {None, listed[name].size}:
                difference = f"{name} had {quantity(listed[name].size, 'byte')} then, and has {sizes[name]:,} now"
            elif sha256s is not None and sha256s[name] != listed[name].sha256:
                difference = f"{name} has different content now (sha256)"
            else:
                continue
            raise InputError(
                f"corpus.remove_listed: {self.path} lists near-duplicates of another text ({self.header.source}): "
                f"{difference}. {_MAKE_AGAIN} from corpus.source, or correct the path"
            )


def open_listed(path: Path) -> Listed:
    """Read the first line of a file of pairs, and hash the file. Raises InputError if it is no such file."""
    if path.exists() and not path.is_file():
        raise InputError(f"corpus.remove_listed: {path} is not a file. Correct the path")
    try:
        with open(path, "rb") as file:
            first = file.readline(_MOST_LINE_BYTES)
        sha256 = digest_file(path).sha256
    except OSError as error:
        raise InputError(f"corpus.remove_listed cannot be read: {explain(error)}. Correct the path") from error
    try:
        value = orjson.loads(first)
        is_pairs = isinstance(value, dict) and value.get("kind") == PAIRS_KIND
    except orjson.JSONDecodeError:
        is_pairs = False
    if not is_pairs:
        raise InputError(
            f"corpus.remove_listed: {path} is not a file of pairs of near-duplicates. Name one that `t5-pretrain data "
            "index duplicates` wrote"
        )
    if value.get("schema_version") != PAIRS_VERSION:
        raise InputError(
            f"corpus.remove_listed: {path} was written by another version of t5-pretrain, and does not say what it "
            f"was made of in a form that this one reads. {_MAKE_AGAIN}"
        )
    try:
        return Listed(path, sha256, _Header.model_validate(value))
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise InputError(f"corpus.remove_listed: {path} is damaged ({name} in its first line). {_MAKE_AGAIN}") from None


def write_rows(job: Json, advance: Advance) -> Json:
    """Note which rows of a chunk of a text are passages. ``find_repetitions`` makes the job.

    The arrays are ``rows`` (int64), counted over all files of the text, and ``ids`` (uint64), digests of the ids.
    """
    rows, ids = array("q"), array("Q")
    for (source, segment), first_row in zip(stretches_of(job), job["first_rows"], strict=True):
        for row in rows_in([(source, segment)]):
            rows.append(first_row + row.number)
            ids.append(_digest_of(row.passage.id))
        advance(segment.text_bytes)
    with replacing(Path(job["out"])) as file:
        np.savez(file, rows=np.frombuffer(rows, np.int64), ids=np.frombuffer(ids, np.uint64))
    return {}


class ListedRows(NamedTuple):
    """The pairs as rows, which are counted over all files of a text."""

    rows: np.ndarray
    """int64 of shape (pairs, 2)."""
    ids: np.ndarray
    """The digests of their ids: uint64 of the same shape."""


def read_rows(listed: Listed, files: Sequence[FileSegments]) -> ListedRows:
    """Read the pairs. Raises InputError if the file was changed, or names a row that the text does not have."""
    starts, ends = first_rows(files), {each.source.name: each.passages + each.empty_passages for each in files}
    digest, rows, ids = hashlib.sha256(), array("q"), array("Q")
    with open(listed.path, "rb") as file:
        digest.update(file.readline(_MOST_LINE_BYTES))
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), start=2):
            digest.update(line)
            try:
                value = orjson.loads(line)
                both = [(each["file"], each["row"], each["id"]) for each in (value["first"], value["second"])]
                is_row = all(type(row) is int and 0 <= row < ends[name] for name, row, _ in both)
            except (orjson.JSONDecodeError, KeyError, TypeError):
                is_row = False
            if not is_row:
                raise InputError(
                    f"corpus.remove_listed: {listed.path} line {number} does not name two rows of the text. "
                    f"{_MAKE_AGAIN}"
                )
            rows.extend(starts[name] + row for name, row, _ in both)
            ids.extend(_digest_of(str(each)) for _, _, each in both)
    if digest.hexdigest() != listed.sha256 or len(rows) != 2 * listed.header.pairs:
        raise InputError(
            f"corpus.remove_listed: {listed.path} has {quantity(len(rows) // 2, 'pair')}, but should have "
            f"{listed.header.pairs:,} by its first line, or it was changed while it was read. {_MAKE_AGAIN}"
        )
    return ListedRows(np.array(rows, np.int64).reshape(-1, 2), np.array(ids, np.uint64).reshape(-1, 2))


def first_rows(files: Sequence[FileSegments]) -> dict[str, int]:
    """Return the number of each file's first row, counted over all files, by the file's name."""
    found, before = dict[str, int](), 0
    for each in files:
        found[each.source.name] = before
        before += each.passages + each.empty_passages
    return found


def passages_at(listed: Listed, wanted: ListedRows, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the numbers of the passages of all pairs: int64 of shape (pairs, 2).

    ``chunks`` are what ``write_rows`` wrote of them, in order. Raises InputError if a row has no text, or another id.
    """
    rows, of_pair = np.unique(wanted.rows, return_inverse=True)
    passages, ids, before = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.uint64), 0
    for rows_of_chunk, ids_of_chunk in chunks:
        first, end = np.searchsorted(rows, [rows_of_chunk[0], rows_of_chunk[-1] + 1])
        places = np.searchsorted(rows_of_chunk, rows[first:end])
        is_there = rows_of_chunk[places] == rows[first:end]
        passages[first:end][is_there] = before + places[is_there]
        ids[first:end] = ids_of_chunk[places]
        before += len(rows_of_chunk)
    of_pair = of_pair.reshape(wanted.rows.shape)
    wrong = np.flatnonzero(((passages[of_pair] < 0) | (ids[of_pair] != wanted.ids)).any(axis=1))
    if len(wrong):
        raise InputError(
            f"corpus.remove_listed: {listed.path} line {wrong[0] + 2} names a row that has no text, or whose id "
            f"differs: {_rows_of_line(listed.path, int(wrong[0]) + 1)}. {_MAKE_AGAIN}"
        )
    return np.asarray(passages[of_pair])


def _rows_of_line(path: Path, line: int) -> str:
    with open(path, "rb") as file:
        value: dict[str, Any] = orjson.loads(next(islice(file, line, None)))
    return " and ".join(
        f"{each['file']} row {each['row']} ({each['id']!r})" for each in (value["first"], value["second"])
    )


def _digest_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
