"""Reads passages from files: one per line of .txt, .jsonl or .tsv, record of .csv, row of .parquet or a dump's page.

Reading can start anywhere in plain files. In a compressed one, all before it has to be decompressed: ``OpenFile`` keeps
it open, and of a large one the corpus stage stores the passages once more (``PassageFrames``), for random access.

Rows are counted from 0. Blank lines and the header of a .tsv or .csv count, too, so that reading can start at any
row, given its number and its byte offset in the decompressed stream.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Self

import orjson
from backports import zstd

from t5train.data.formats.compressed import COMPRESSIONS, Decompressed, DecompressionError
from t5train.data.formats.passage_frames import frame_rows, is_framed
from t5train.data.native import segmenter_build
from t5train.data.passages import READ_COLUMNS, Passage, Row, SourceFile, id_at, title_of
from t5train.errors import InputError
from t5train.files.os_errors import reason
from t5train.quantities import format_bytes, quantity

PLAIN_FORMATS = (".txt", ".jsonl", ".tsv", ".csv")
FORMATS = (*PLAIN_FORMATS, ".parquet")
_DUMP, _DUMP_NAME = ".xml", re.compile(r"-pages-(articles|meta-current)[a-z0-9-]*\.xml(-p[0-9]+p[0-9]+)?$")
"""Dumps of Wikipedia are told from other XML files by their usual names."""
_BESIDE_DUMPS = re.compile(r"-pages-articles-multistream-index[0-9]*\.txt(-p[0-9]+p[0-9]+)?$|-(md5|sha1)sums\.txt$")
"""Names of files that lie beside dumps, and are no text."""
_BLOCK_BYTES = 128 << 10
SEGMENT_BYTES = 64 << 10
"""Text of a segment, and so of a frame: each ends with the passage that reaches this size."""
MAX_LINE_BYTES = 64 << 20
"""Longer lines are refused: a passage is read, encoded and held in memory as a whole, once per worker process."""
_SEEK_BYTES = 64 << 20
_ROUNDED_FROM = 2.0**63
_NO_IDS = {"NaN", "nan"}
_WHOLE_FLOAT = re.compile(r"(-?(?:0|[1-9][0-9]{0,99}))\.0")
_TSV_HEADER = "\t".join(READ_COLUMNS)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def is_compressed(path: Path) -> bool:
    """Whether a file has to be decompressed from its beginning."""
    return path.suffix in COMPRESSIONS


def is_dump(name: str) -> bool:
    """Whether a file is a dump of Wikipedia, of which reading a part takes as long as reading all."""
    return format_of(name) == _DUMP


def format_of(name: str) -> str | None:
    """Return one of ``FORMATS`` for a file name, compressed or not, or ``.xml`` for a dump of Wikipedia; else None."""
    plain = name.removesuffix(Path(name).suffix) if Path(name).suffix in COMPRESSIONS else name
    if _DUMP_NAME.search(plain):
        return _DUMP
    if _BESIDE_DUMPS.search(plain):
        return None
    suffixes = Path(name).suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS and suffixes[-2:-1] != [".parquet"]:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


class OpenFile:
    """The file that was read last, decompressed; a context manager. Reading on in it decompresses nothing again."""

    def __init__(self, seeking: Callable[[], None] = lambda: None) -> None:
        """``seeking`` is called every few seconds while a compressed file is decompressed up to a place."""
        self._seeking = seeking
        self._path: Path | None = None
        self._stack = ExitStack()
        self._stored: IO[bytes] | None = None
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def stored_bytes_read(self) -> int:
        """How far the file has been read, in bytes as stored; 0 if none is open."""
        return 0 if self._stored is None else self._stored.tell()

    def at(self, path: Path, offset: int) -> IO[bytes]:
        """Return a file, opened if it is not open before this place, at byte ``offset`` of its decompressed content."""
        if self._file is None or path != self._path or self._file.tell() > offset:
            self._stack.close()
            self._path = path
            self._stored = self._stack.enter_context(open(path, "rb"))  # noqa: SIM115 - the stack closes it
            self._file = self._stack.enter_context(_decompressed(path, self._stored))
        for place in range(self._file.tell() + _SEEK_BYTES, offset, _SEEK_BYTES):
            self._file.seek(place)
            self._seeking()
        self._file.seek(offset)
        return self._file

    def read_on(self, path: Path) -> None:
        """Read a compressed file to its end. Raises DecompressionError if it is damaged."""
        if is_compressed(path):
            place = 0 if self._file is None or path != self._path else self._file.tell()
            self.at(path, place).seek(0, os.SEEK_END)


def rows(source: SourceFile, number: int = 0, offset: int = 0, opened: OpenFile | None = None) -> Iterator[Row]:
    """Yield the rows of a file from row ``number``, which begins at byte ``offset``, to the end.

    ``opened`` keeps the file open for later calls, except .parquet. Raises InputError if a row is malformed, too long
    or not valid UTF-8 (the error names its line), or if the file is truncated, damaged or of an unknown format.
    """
    reader = frame_rows if is_framed(source) else _READERS.get(format_of(source.name) or "")
    if reader is None:
        compressed = ", ".join(COMPRESSIONS)
        raise InputError(
            f"{source.shown} has an unsupported format. Use {', '.join(FORMATS)}, or one of the first four compressed "
            f"({compressed})"
        )
    with OpenFile() if opened is None else nullcontext(opened) as file, read_to_end(source, file):
        yield from reader(source, number, offset, file)


@contextmanager
def read_to_end(source: SourceFile, file: OpenFile) -> Iterator[None]:
    """Let errors of a file say that it is damaged, if it is. Raises InputError if it cannot be read to its end."""
    try:
        try:
            yield
        except InputError:  # of damaged content, perhaps: checksums come after what they are of
            file.read_on(source.path)
            raise
    except DecompressionError as error:
        raise InputError(f"{source.shown} cannot be read to its end ({error}). {error.remedy}") from error
    except PermissionError as error:
        raise InputError(f"{source.shown} cannot be read: {reason(error)}") from error
    except (OSError, EOFError, zstd.ZstdError) as error:
        raise InputError(
            f"{source.shown} cannot be read to its end ({error}). If the file is damaged, fetch or write it again"
        ) from error


def _txt(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[Row]:
    for row, start, line in raw_lines(source, number, offset, opened):
        text = _decoded(source, row, start, line).strip()
        if start == 0 and "\r" in text and not line.endswith(b"\n"):
            raise InputError(
                f"{source.shown} has carriage returns (CR), but no line feed (LF), so all of it would be one passage. "
                "Convert its line ends to LF"
            )
        yield Row(row, start, Passage(f"{source.name}:{row}", "", text))


def _jsonl(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[Row]:
    native = None if is_compressed(source.path) else segmenter_build.load(segmenter_build.built())
    if native is None:  # also where reading ahead would mean to decompress again
        for row, start, line in raw_lines(source, number, offset, opened):
            yield _json_row(source, row, start, line)
        return
    file, block, at, ended = opened.at(source.path, offset), b"", 0, False
    while not ended or at < len(block):
        found, end = native.json_rows(block, at, source.name, number, offset, Row, Passage)
        yield from found
        number, offset, at = number + len(found), offset + end - at, end
        line = block[at : block.find(b"\n", at) + 1] or (block[at:] if ended else b"")
        if line:
            _require_short(source, number, len(line))
            yield _json_row(source, number, offset, line)
            number, offset, at = number + 1, offset + len(line), at + len(line)
        elif not ended:
            rest = block[at:]
            _require_short(source, number, len(rest))
            more = file.read(max(_BLOCK_BYTES, len(rest)))  # twice as much each time, if a line is long
            block, at, ended = rest + more, 0, not more


def _json_row(source: SourceFile, row: int, start: int, line: bytes) -> Row:
    return Row(row, start, _json_passage(source, row, json_value(source, row, start, line)))


def json_value(source: SourceFile, row: int, start: int, line: bytes) -> Any:
    """Parse a line, which begins at byte ``start``; a blank one is an empty passage."""
    try:
        return _with_whole_id(orjson.loads(line), line)
    except orjson.JSONDecodeError:  # or UTF-8, or blank
        return _json_value(source, row, _decoded(source, row, start, line).rstrip("\r\n"))


def _json_value(source: SourceFile, row: int, line: str) -> Any:
    if not line.strip():
        return {"text": ""}
    try:
        return _with_whole_id(orjson.loads(line), line)
    except orjson.JSONDecodeError as error:
        raise InputError(
            f"{source.shown} line {row + 1} is not JSON ({error.msg}, at column {error.colno}). Correct this line"
        ) from None


def _json_passage(source: SourceFile, row: int, value: Any) -> Passage:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise InputError(f'{source.shown} line {row + 1} is not an object with "text": "...". Correct this line')
    return Passage(id_at(value.get("id"), source, row), title_of(value.get("title")), value["text"])


def _with_whole_id(value: Any, line: bytes | str) -> Any:
    """Return a parsed line, again if its id may be a whole number of more than 64 bits, which orjson rounds."""
    found = value.get("id") if isinstance(value, dict) else None
    if not isinstance(found, float) or abs(found) < _ROUNDED_FROM:
        return value
    try:
        return json.loads(line)
    except RecursionError:  # orjson allows more
        raise orjson.JSONDecodeError("values are nested too deeply", "", 0) from None


def _tsv(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[Row]:
    lines = text_lines(source, number, offset, opened)
    if number == 0:
        _, _, header = next(lines, (0, 0, ""))
        if header != _TSV_HEADER:
            raise InputError(
                f"{source.shown} begins with {header[:80]!r}, but must begin with the header {_TSV_HEADER!r}. Add this "
                "header, and order the columns accordingly"
            )
    for row, start, line in lines:
        yield Row(row, start, _tsv_passage(source, row, line))


def _tsv_passage(source: SourceFile, row: int, line: str) -> Passage:
    if not line:
        return Passage(f"{source.name}:{row}", "", "")
    fields = line.split("\t")
    if len(fields) != 3:
        raise InputError(
            f"{source.shown} line {row + 1} has {quantity(len(fields), 'field')} separated by tabs, but must have "
            "three: id, text, title. Correct this line"
        )
    name, text, title = map(unquoted, fields)
    return Passage(id_at(_untyped(name), source, row), title, text)


def _untyped(name: str) -> str:
    """Return an id of a format without types. Programs write a column of floats with 1.0, and NaN for no id."""
    if name in _NO_IDS:
        return ""
    whole = _WHOLE_FLOAT.fullmatch(name) if name.endswith(".0") else None
    return str(int(whole[1])) if whole else name


def unquoted(field: str) -> str:
    """Return a field without quotes if it was written in quotes, so that each in it is doubled."""
    quoted = len(field) >= 2 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', "")
    return field[1:-1].replace('""', '"') if quoted else field


def _csv(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[Row]:
    with OpenFile() as beginning:
        _, _, header = next(csv_records(source, 0, 0, beginning), (0, 0, []))
    if "text" not in header or any(header.count(name) > 1 for name in READ_COLUMNS):
        raise InputError(
            f"{source.shown} begins with {','.join(header)[:80]!r}, but must begin with a header that names one column "
            "'text' and may name one 'id' and one 'title', separated by commas. Add or correct this header"
        )
    columns = {name: header.index(name) for name in READ_COLUMNS if name in header}
    for row, start, fields in csv_records(source, number, offset, opened):
        if row > 0:
            require_fields(source, row, fields, header)
            found = {name: fields[column] for name, column in columns.items()} if fields else {}  # of a blank line
            name = id_at(_untyped(found.get("id", "")), source, row)
            yield Row(row, start, Passage(name, found.get("title", ""), found.get("text", "")))


def require_fields(source: SourceFile, row: int, fields: list[str], header: list[str]) -> None:
    """Raise InputError if a record has another number of fields than the header. A blank line has none."""
    if fields and len(fields) != len(header):
        raise InputError(
            f"{source.shown} record {row + 1} has {quantity(len(fields), 'field')}, but the header has {len(header)}. "
            'Correct this record: fields with commas, quotes or line ends are written in double quotes, "like ""this"""'
        )


def csv_records(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the number, byte offset and fields of each record (RFC 4180), whose fields may have several lines."""
    file, start, end = opened.at(source.path, offset), offset, offset

    def lines() -> Iterator[str]:
        nonlocal end
        while line := file.readline(MAX_LINE_BYTES + 1):
            at, end = end, end + len(line)
            _require_short(source, number, end - start, "record")
            yield _decoded(source, number, at, line, "record")

    csv.field_size_limit(MAX_LINE_BYTES)  # the default is 128 KiB; each record is bounded here
    records = csv.reader(lines(), strict=True)
    try:
        for fields in records:
            yield number, start, fields
            number, start = number + 1, end
    except csv.Error as error:
        said, remedy = str(error), "Correct this record: each double quote in a field in double quotes is doubled"
        if said.startswith("new-line character"):  # and goes on with advice to programmers
            said = "a carriage return (CR) is in a field without double quotes"
            remedy = "Convert the line ends of the file to LF, or write this field in double quotes"
        raise InputError(
            f"{source.shown} record {number + 1}, which begins at byte {start:,} of the text, is not CSV ({said}). "
            f"{remedy}"
        ) from None


def _parquet(source: SourceFile, number: int, offset: int, _: OpenFile) -> Iterator[Row]:
    from t5train.data.formats.parquet import parquet_rows  # pyarrow is slow to import, and few processes need it

    for row in parquet_rows(source, number, offset):
        require_short_text(source.name, row.number, row.passage.text)
        yield row


def require_short_text(name: str, row: int, text: str) -> None:
    """Raise InputError if the text of a row of ``name`` has more characters than a line of text may have bytes."""
    if len(text) > MAX_LINE_BYTES:
        raise InputError(
            f"{name}, row {row}: the text has more than {format_bytes(MAX_LINE_BYTES)}, but it is one passage and is "
            "processed as a whole. Choose a text in smaller rows"
        )


def _dump(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[Row]:
    from t5train.data.formats.wikipedia_dump import dump_rows  # few texts are dumps

    return dump_rows(source, opened.at(source.path, offset), number)


def text_lines(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[tuple[int, int, str]]:
    """Yield the row number, byte offset and text (without line end) of each line."""
    for row, start, line in raw_lines(source, number, offset, opened):
        yield row, start, _decoded(source, row, start, line).rstrip("\r\n")


def _decoded(source: SourceFile, row: int, offset: int, line: bytes, what: str = "line") -> str:
    """Return the text of a line, without the byte order mark of the file."""
    if b"\0" in line:
        raise InputError(
            f"{source.shown} {what} {row + 1} has a NUL byte, so the file is not text in UTF-8. Convert it from "
            "another encoding, such as UTF-16, or leave it out if it is not text"
        )
    content = line.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else line
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source.shown} {what} {row + 1} is not UTF-8: byte {offset + error.start} of the text is "
            f"0x{line[error.start]:02x}. Convert the file to UTF-8, or leave it out if it is not text"
        ) from None


def raw_lines(source: SourceFile, number: int, offset: int, opened: OpenFile) -> Iterator[tuple[int, int, bytes]]:
    """Yield the row number, byte offset and bytes (with line end) of each line."""
    file = opened.at(source.path, offset)
    while line := file.readline(MAX_LINE_BYTES + 1):
        _require_short(source, number, len(line))
        yield number, offset, line
        number += 1
        offset += len(line)


def _require_short(source: SourceFile, number: int, size_bytes: int, what: str = "line") -> None:
    if size_bytes > MAX_LINE_BYTES:
        raise InputError(
            f"{source.shown} {what} {number + 1} has more than {format_bytes(MAX_LINE_BYTES)}, but a {what} is one "
            f"passage and is processed as a whole. Split it into {what}s, for example at paragraphs"
        )


@contextmanager
def _decompressed(path: Path, stored: IO[bytes]) -> Iterator[IO[bytes]]:
    if path.suffix not in COMPRESSIONS:
        yield stored
        return
    with Decompressed(stored, path.suffix) as file:
        yield file


_READERS: dict[str, Callable[[SourceFile, int, int, OpenFile], Iterator[Row]]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".tsv": _tsv,
    ".csv": _csv,
    ".parquet": _parquet,
    _DUMP: _dump,
}
