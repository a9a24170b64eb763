"""The segment table of a corpus. A segment is a range of rows of one file with about 64 KiB of text.

The table makes it possible to plan shards without reading the text again, and to start reading in the middle of a file.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from t5train.data.passages import IdSequence, Passage, Row, SourceFile, TextDigests, nonblank_bytes
from t5train.data.readers import SEGMENT_BYTES, OpenFile, PassageFrames, rows
from t5train.data.worker_processes import Advance, Json
from t5train.files.atomic import replacing

SEGMENTS = "segments.json"
_STEP_BYTES = 4 << 20


def _ignore(read_bytes: int) -> None:
    """Report nothing."""


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


def scan(
    source: SourceFile,
    frames: PassageFrames | None = None,
    digests: TextDigests | None = None,
    advance: Advance = _ignore,
    ids: IdSequence | None = None,
) -> FileSegments:
    """Read a whole file and divide it into segments.

    Args:
        source: The file.
        frames: Gets all passages, a frame for each segment. The segments' offsets are then those of their frames.
        digests: Gets all texts.
        advance: Called with the bytes that were read since the last call, as stored.
        ids: Gets all rows.

    Raises:
        InputError: The file cannot be read as text.

    """
    segments: list[Segment] = []
    passages = empty = total = read_bytes = 0
    first: Row | None = None
    with OpenFile() as opened:
        for row in rows(source, opened=opened):
            first = first or row
            size = nonblank_bytes(row.passage.text)
            passages += size > 0
            empty += size == 0
            total += size
            if frames is not None:
                frames.add(row.passage)
            if ids is not None:
                ids.add(row)
            if digests is not None and size:
                digests.add(row.passage.text)
            if total >= SEGMENT_BYTES:
                segments.append(_segment(first, row, total, frames))
                first, total = None, 0
                advance(opened.stored_bytes_read - read_bytes)
                read_bytes = opened.stored_bytes_read
    if first is not None and total:
        segments.append(_segment(first, row, total, frames))
    advance(source.path.stat().st_size - read_bytes)
    return FileSegments(source, passages, empty, segments)


def _segment(first: Row, last: Row, size_bytes: int, frames: PassageFrames | None) -> Segment:
    offset = first.offset
    if frames is not None:
        offset = frames.offset
        frames.end_frame()
    return Segment(first.number, last.number + 1 - first.number, offset, size_bytes)


def scan_file(job: Json, advance: Advance) -> Json:
    """Scan the file of a job. The worker processes of the corpus stage call this.

    If the job names a file for its passages, they are stored there once more, and the segments are those of that file.
    The digests of the texts are written to another file.
    """
    source = SourceFile(Path(job["path"]), job["name"])
    watched, digests, ids = _InSteps(advance), TextDigests(), IdSequence()
    if job["frames"] is None:
        scanned = scan(source, None, digests, watched, ids)
    else:
        with replacing(Path(job["frames"])) as file:
            scanned = scan(source, PassageFrames(file), digests, watched, ids)
    watched.flush()
    return {
        "name": job["name"],
        "passages": scanned.passages,
        "empty": scanned.empty_passages,
        "segments": scanned.segments,
        "digests_step": digests.write(Path(job["digests"])),
        "first_id": ids.first,
        "broken_id": ids.broken,
    }


class _InSteps:
    """Passes progress on in steps, because each is a message to another process."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._bytes = advance, 0

    def __call__(self, read_bytes: int) -> None:
        self._bytes += read_bytes
        if self._bytes >= _STEP_BYTES:
            self._advance(self._bytes)
            self._bytes = 0

    def flush(self) -> None:
        """Pass on what is left."""
        self._advance(self._bytes)
        self._bytes = 0


def passages_of(source: SourceFile, segment: Segment, opened: OpenFile | None = None) -> Iterator[Passage]:
    """Yield the passages of a segment that have text.

    With the same ``opened``, a compressed file is decompressed once for all segments that follow each other in it.
    """
    for row in islice(rows(source, segment.first_row, segment.offset, opened), segment.rows):
        if row.passage.text.strip():
            yield row.passage


def passages_in(segments: Iterable[tuple[SourceFile, Segment]]) -> Iterator[Passage]:
    """Yield the passages of segments that have text, in order."""
    with OpenFile() as opened:
        for source, segment in segments:
            yield from passages_of(source, segment, opened)


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
