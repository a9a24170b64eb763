"""The segment table of a corpus. A segment is a range of rows of one file with about 64 KiB of text.

The table makes it possible to plan shards without reading the text again, and to start reading in the middle of a file.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from t5train.data.formats.passage_frames import PassageFrames
from t5train.data.passages import (
    FewIds,
    IdSequence,
    Passage,
    Row,
    Skipped,
    SourceFile,
    TextCounts,
    TextDigests,
    text_bytes,
)
from t5train.data.readers import SEGMENT_BYTES, OpenFile, rows
from t5train.data.worker_processes import Advance, InSteps, Json
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


class TextsSeen(NamedTuple):
    """What is noted of all texts of a file while it is read."""

    digests: TextDigests
    counts: TextCounts
    ids: IdSequence
    few_ids: FewIds
    skipped: Skipped

    def add(self, row: Row, *, has_text: bool) -> None:
        """Add the next row."""
        self.ids.add(row)
        self.skipped.add(row)
        if has_text and self.few_ids.found is not None:
            self.few_ids.add(row)

    def add_texts(self, texts: list[bytes]) -> None:
        """Add the texts of a segment, without white space at their ends."""
        self.digests.add(texts)
        self.counts.add(texts)


class Stretch(NamedTuple):
    """Consecutive rows of one file, in a form that a worker's job can hold."""

    path: str
    name: str
    segment: Segment
    part: int = 0
    """Which of the texts of a mixture the rows belong to."""


def scan(
    source: SourceFile,
    frames: PassageFrames | None = None,
    seen: TextsSeen | None = None,
    advance: Advance = _ignore,
) -> FileSegments:
    """Read a whole file and divide it into segments.

    Args:
        source: The file.
        frames: Gets all passages, a frame for each segment. The segments' offsets are then those of their frames.
        seen: Gets all texts, without white space at their ends.
        advance: Called with the bytes that were read since the last call, as stored.

    Raises:
        InputError: The file cannot be read as text.

    """
    segments: list[Segment] = []
    passages = empty = total = read_bytes = 0
    first: Row | None = None
    texts = list[bytes]()
    with OpenFile() as opened:
        for row in rows(source, opened=opened):
            first = first or row
            text = row.passage.text
            stripped = text.strip()
            if stripped:
                content = stripped.encode()
                texts.append(content)
                total += len(content) if len(stripped) == len(text) else text_bytes(text)
            else:
                empty += 1
            if frames is not None:
                frames.add(row.passage)
            if seen is not None:
                seen.add(row, has_text=bool(stripped))
            if total >= SEGMENT_BYTES:
                segments.append(_segment(first, row, total, frames))
                passages += len(texts)
                if seen is not None:
                    seen.add_texts(texts)
                first, total, texts = None, 0, []
                advance(opened.stored_bytes_read - read_bytes)
                read_bytes = opened.stored_bytes_read
    if first is not None and total:
        segments.append(_segment(first, row, total, frames))
    passages += len(texts)
    if seen is not None:
        seen.add_texts(texts)
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
    watched, seen = (
        InSteps(advance, _STEP_BYTES),
        TextsSeen(TextDigests(), TextCounts(), IdSequence(), FewIds(), Skipped()),
    )
    if job["frames"] is None:
        scanned = scan(source, None, seen, watched)
    else:
        with replacing(Path(job["frames"])) as file:
            scanned = scan(source, PassageFrames(file), seen, watched)
    watched.flush()
    return {
        "digests": job["digests"],
        "passages": scanned.passages,
        "empty": scanned.empty_passages,
        "segments": scanned.segments,
        "digests_step": seen.digests.write(Path(job["digests"])),
        "odd": seen.counts.odd,
        "lengths": seen.counts.lengths,
        "first_id": seen.ids.first,
        "broken_id": seen.ids.broken,
        "few_ids": seen.few_ids.found,
        "skipped_pages": seen.skipped.pages,
        "first_skipped": seen.skipped.first,
    }


def write_frames(file: IO[bytes], passages: Iterable[Passage]) -> list[Segment]:
    """Write passages that have text to a file, a frame for each segment, and return the segments."""
    frames, segments = PassageFrames(file), list[Segment]()
    row = first_row = total = 0
    for row, passage in enumerate(passages, start=1):
        frames.add(passage)
        total += text_bytes(passage.text)
        if total >= SEGMENT_BYTES:
            segments.append(_segment_of_frame(frames, first_row, row, total))
            first_row, total = row, 0
    if total:
        segments.append(_segment_of_frame(frames, first_row, row, total))
    return segments


def _segment_of_frame(frames: PassageFrames, first_row: int, end_row: int, size_bytes: int) -> Segment:
    segment = Segment(first_row, end_row - first_row, frames.offset, size_bytes)
    frames.end_frame()
    return segment


def passages_of(source: SourceFile, segment: Segment, opened: OpenFile | None = None) -> Iterator[Passage]:
    """Return the passages of a segment that have text.

    With the same ``opened``, a compressed file is decompressed once for all segments that follow each other in it.
    """
    return (row.passage for row in _rows_of(source, segment, opened))


def _rows_of(source: SourceFile, segment: Segment, opened: OpenFile | None) -> Iterator[Row]:
    for row in islice(rows(source, segment.first_row, segment.offset, opened), segment.rows):
        if row.passage.text.strip():
            yield row


def rows_in(
    segments: Iterable[tuple[SourceFile, Segment]], seeking: Callable[[], None] = lambda: None
) -> Iterator[Row]:
    """Yield the rows of segments that have text, in order. ``seeking`` is as in OpenFile."""
    with OpenFile(seeking) as opened:
        for source, segment in segments:
            yield from _rows_of(source, segment, opened)


def passages_in(
    segments: Iterable[tuple[SourceFile, Segment]], seeking: Callable[[], None] = lambda: None
) -> Iterator[Passage]:
    """Yield the passages of segments that have text, in order. ``seeking`` is as in OpenFile."""
    return (row.passage for row in rows_in(segments, seeking))


def by_part(files: Iterable[FileSegments]) -> list[list[FileSegments]]:
    """Return the files of each text of a mixture, in order; of one text, a list of one list."""
    parts: dict[int, list[FileSegments]] = {}
    for file in files:
        parts.setdefault(file.source.part, []).append(file)
    return [parts[part] for part in sorted(parts)]


def size_of_text(files: Iterable[FileSegments]) -> int:
    """Return the UTF-8 size of all texts."""
    return sum(segment.text_bytes for file in files for segment in file.segments)


def divided(files: Sequence[FileSegments], number: int) -> list[list[Stretch]]:
    """Distribute consecutive segments evenly over about ``number`` lists, at least one."""
    segments = [(file.source, segment) for file in files for segment in file.segments]
    total = size_of_text(files)
    number = max(1, min(len(segments), number))
    found: list[list[Stretch]] = [[] for _ in range(number)]
    before = 0
    for source, segment in segments:
        middle = before + segment.text_bytes // 2
        stretch = Stretch(str(source.path.absolute()), source.name, segment, source.part)
        _extend(found[middle * number // total], stretch)
        before += segment.text_bytes
    return [stretches for stretches in found if stretches]


def _extend(stretches: list[Stretch], stretch: Stretch) -> None:
    """Append a stretch, or extend the last one if that is of the same file."""
    if stretches and stretches[-1]._replace(segment=stretch.segment) == stretch:
        last, new = stretches[-1].segment, stretch.segment
        joined = Segment(last.first_row, last.rows + new.rows, last.offset, last.text_bytes + new.text_bytes)
        stretches[-1] = stretches[-1]._replace(segment=joined)
    else:
        stretches.append(stretch)


def stretches_of(job: Json) -> list[tuple[SourceFile, Segment]]:
    """Return the stretches of a worker's job."""
    return [(SourceFile(Path(path), name, part), Segment(*segment)) for path, name, segment, part in job["stretches"]]


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
        | ({"part": file.source.part} if file.source.part else {})  # without mixtures, as earlier versions wrote it
        for file in files
    ]
    with replacing(folder / SEGMENTS) as out:
        out.write(json.dumps({"schema_version": 1, "files": value}).encode())


def read_segments(folder: Path) -> list[FileSegments]:
    """Read ``segments.json`` from a corpus folder."""
    return [_file_segments(folder, file) for file in json.loads((folder / SEGMENTS).read_bytes())["files"]]


def _file_segments(folder: Path, file: dict[str, Any]) -> FileSegments:
    source = SourceFile(folder / file["path"], file["name"], file.get("part", 0))
    return FileSegments(source, file["passages"], file["empty_passages"], [Segment(*each) for each in file["segments"]])


def _relative(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path
