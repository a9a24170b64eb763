"""Reads passages from .parquet files. Only the columns id, text and title are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from t5train.data.passages import READ_COLUMNS, Passage, Row, SourceFile, id_at, title_of
from t5train.errors import InputError, printable

BATCH_ROWS = 4096
_MAGIC, _LAST_BYTES = b"PAR1", 8
"""A file begins and ends with the first; the length of its footer is before the one at the end."""
_DAMAGED = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
"""What pyarrow raises for damaged files: OSError for a page that differs from its checksum."""


def parquet_rows(source: SourceFile, number: int, offset: int) -> Iterator[Row]:  # noqa: ARG001  rows have no offset here
    """Yield the rows from ``number`` on. Row groups before it are skipped without being read."""
    with open_parquet(source.path) as file:
        yield from _rows(source, file, number)


@contextmanager
def open_parquet(path: Path, **options: Any) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a file whose pages are compared with their checksums, if they have any.

    Raises InputError if the file, or what is read of it, is damaged, or if it is several files.
    """
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True, **options) as file:
            with open(path, "rb") as stored:
                if holds_several(file.metadata, path.stat().st_size, lambda start, end: _range(stored, start, end)):
                    raise InputError(
                        f"{printable(str(path))} is several .parquet files one after another, of which only the last "
                        "would be read. Store each in a file of its own"
                    )
            yield file
    except _DAMAGED as error:
        raise _damaged(path, "", error) from error


def holds_several(
    metadata: pyarrow.parquet.FileMetaData, size_bytes: int, read_range: Callable[[int, int], bytes]
) -> bool:
    """Whether a file is several .parquet files, as ``cat`` joins them: then one ends where the next one begins.

    The last one's footer describes the first bytes, so what it does not describe is between these and the footer.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    ends = [end for group in groups for _, _, end in column_chunks(group)]
    start, end = max(ends, default=0), size_bytes - _LAST_BYTES - metadata.serialized_size
    return start < end and _MAGIC + _MAGIC in read_range(start, end)


def column_chunks(group: Any) -> list[tuple[str, int, int]]:
    """Return the path of each column of a row group, and where it begins and ends in the file."""
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in columns]
    return [
        (each.path_in_schema, start, start + each.total_compressed_size)
        for each, start in zip(columns, starts, strict=True)
    ]


def _range(stored: IO[bytes], start: int, end: int) -> bytes:
    stored.seek(start)
    return stored.read(end - start)


def batches(
    path: Path,
    file: pyarrow.parquet.ParquetFile,
    rows: int,
    groups: Sequence[int],
    columns: Sequence[str],
    *,
    use_threads: bool = True,
) -> Iterator[Any]:
    """Yield columns of row groups in batches of at most so many rows. Raises InputError if they are damaged."""
    row = sum(file.metadata.row_group(number).num_rows for number in range(groups[0])) if groups else 0
    try:
        for batch in file.iter_batches(rows, row_groups=list(groups), columns=list(columns), use_threads=use_threads):
            yield batch
            row += batch.num_rows
    except _DAMAGED as error:
        raise _damaged(path, f" from row {row:,} on", error) from error


def is_text(kind: pyarrow.DataType) -> bool:
    """Whether the values of a column are text, however Arrow holds them in memory."""
    types = pyarrow.types
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):  # such as JSON
        return is_text(kind.storage_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def column_kinds(schema: Any, above: str = "") -> list[tuple[str, pyarrow.DataType]]:
    """Return the path of each column, also inside of structs, such as ``translation.en``, and its type."""
    found = list[tuple[str, pyarrow.DataType]]()
    for field in schema:
        is_struct = pyarrow.types.is_struct(field.type)
        found += column_kinds(field.type, f"{above}{field.name}.") if is_struct else [(above + field.name, field.type)]
    return found


def _damaged(path: Path, where: str, error: Exception) -> InputError:
    shown, is_encrypted = printable(str(path)), "decrypt" in str(error).lower()
    remedy = "Write the file again without encryption" if is_encrypted else "Fetch or write the file again"
    return InputError(f"{shown} cannot be read as parquet{where} ({printable(' '.join(str(error).split()))}). {remedy}")


def stored_text_bytes(source: SourceFile) -> int:
    """Return about the size of the text: that of the column before compression, from the file's footer."""
    with open_parquet(source.path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == "text")


def require_columns(source: SourceFile, types: Mapping[str, str]) -> None:
    """Raise InputError unless a file has columns of these types."""
    with open_parquet(source.path) as file:
        schema = file.schema_arrow
    found = {column.name: "string" if is_text(column.type) else str(column.type) for column in schema}
    if not types.items() <= found.items():
        wanted = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise InputError(
            f"{source.shown} has the columns {_types(schema)}, but should have {wanted}. It is not a file of the text "
            "that the name stands for: name the files by their URL, if they are what you want"
        )


def _rows(source: SourceFile, file: pyarrow.parquet.ParquetFile, number: int) -> Iterator[Row]:
    columns = _columns(source, file.schema_arrow)
    group, row = 0, 0
    while group < file.num_row_groups and row + file.metadata.row_group(group).num_rows <= number:
        row += file.metadata.row_group(group).num_rows
        group += 1
    for batch in batches(source.path, file, BATCH_ROWS, range(group, file.num_row_groups), columns):
        for values in decoded_rows(source, batch, row):
            if row >= number:
                name = id_at(values.get("id"), source, row)
                yield Row(row, 0, Passage(name, title_of(values.get("title")), values["text"] or ""))
            row += 1


def decoded_rows(source: SourceFile, batch: Any, first_row: int) -> list[dict[str, Any]]:
    """Return the values of each row of a batch. Raises InputError for text that is not UTF-8."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for row, value in enumerate(column, first_row):
                _require_utf8(source, row, name, value)
        raise
    return rows


def _require_utf8(source: SourceFile, row: int, column: str, value: pyarrow.Scalar) -> None:
    try:
        value.as_py()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source.shown}, row {row}: column {column!r} is not UTF-8, as text of parquet is: byte {error.start} is "
            f"0x{error.object[error.start]:02x}. Convert this text, or write the file again without this row"
        ) from None


def _columns(source: SourceFile, schema: pyarrow.Schema) -> list[str]:
    found = [name for name in READ_COLUMNS if name in schema.names]
    if (twice := [name for name in found if schema.names.count(name) > 1]) and twice != ["text"]:
        raise InputError(
            f"{source.shown} has more than one column {twice[0]!r}. Write the file again with one, or choose other "
            "files (corpus.source)"
        )
    if schema.names.count("text") != 1 or not is_text(schema.field("text").type):
        raise InputError(
            f"{source.shown} needs one string column named 'text', but has the columns {_types(schema)}. Write the "
            "file again with such a column, or choose other files (corpus.source)"
        )
    return found


def _types(schema: pyarrow.Schema) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in schema)
