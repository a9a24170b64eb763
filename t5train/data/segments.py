"""The segment table of a corpus. A segment is a range of rows of one file with about 64 KiB of text.

The table makes it possible to plan shards without reading the text again, and to start reading in the middle of a file.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from t5train.data.passages import Passage, Row, SourceFile
from t5train.data.readers import rows
from t5train.data.worker_processes import Advance, Json
from t5train.files.atomic import replacing

SEGMENTS = "segments.json"
_SEGMENT_BYTES = 64 << 10


class Segment(NamedTuple):
    """Consecutive rows of one file; ``text_bytes`` is the UTF-8 size of their passages' texts."""

    first_row: int
    rows: int
    offset: int
    text_bytes: int


class FileSegments(NamedTuple):
    """All segments of one file."""

    source: SourceFile
    passages: int
    empty_passages: int
    segments: list[Segment]


def scan(source: SourceFile) -> FileSegments:
    """Read a whole file and divide it into segments. Raises InputError if the file cannot be read as text."""
    segments: list[Segment] = []
    passages = empty = text_bytes = 0
    first: Row | None = None
    for row in rows(source):
        first = first or row
        size = _text_bytes(row)
        passages += size > 0
        empty += size == 0
        text_bytes += size
        if text_bytes >= _SEGMENT_BYTES:
            segments.append(Segment(first.number, row.number + 1 - first.number, first.offset, text_bytes))
            first, text_bytes = None, 0
    if first is not None and text_bytes:
        segments.append(Segment(first.number, row.number + 1 - first.number, first.offset, text_bytes))
    return FileSegments(source, passages, empty, segments)


def scan_file(job: Json, advance: Advance) -> Json:
    """Scan the file of a job. The worker processes of the corpus stage call this."""
    scanned = scan(SourceFile(Path(job["path"]), job["name"]))
    advance(Path(job["path"]).stat().st_size)
    return {
        "name": job["name"],
        "passages": scanned.passages,
        "empty": scanned.empty_passages,
        "segments": scanned.segments,
    }


def passages_of(source: SourceFile, segment: Segment) -> Iterator[Passage]:
    """Yield the passages of a segment that have text."""
    for row in islice(rows(source, segment.first_row, segment.offset), segment.rows):
        if row.passage.text.strip():
            yield row.passage


def write_segments(folder: Path, files: Iterable[FileSegments]) -> None:
    """Write ``segments.json`` into a corpus folder. Paths inside that folder are stored relative to it."""
    value = [
        {
            "path": str(_relative(file.source.path, folder)),
            "name": file.source.name,
            "passages": file.passages,
            "empty_passages": file.empty_passages,
            "segments": file.segments,
        }
        for file in files
    ]
    with replacing(folder / SEGMENTS) as out:
        out.write(json.dumps({"schema_version": 1, "files": value}).encode())


def read_segments(folder: Path) -> list[FileSegments]:
    """Read ``segments.json`` from a corpus folder."""
    return [_file_segments(folder, file) for file in json.loads((folder / SEGMENTS).read_bytes())["files"]]


def _file_segments(folder: Path, file: dict[str, Any]) -> FileSegments:
    source = SourceFile(folder / file["path"], file["name"])
    return FileSegments(source, file["passages"], file["empty_passages"], [Segment(*each) for each in file["segments"]])


def _relative(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def _text_bytes(row: Row) -> int:
    """Return the UTF-8 size of a row's text, 0 if it is only whitespace."""
    return len(row.passage.text.encode("utf-8")) if row.passage.text.strip() else 0
