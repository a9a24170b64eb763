"""Reads passages from .parquet files. Only the columns id, text and title are read."""

from collections.abc import Iterator, Mapping

import pyarrow
import pyarrow.parquet

from t5train.data.passages import READ_COLUMNS, Passage, Row, SourceFile, id_at
from t5train.errors import InputError

_BATCH_ROWS = 4096


def parquet_rows(source: SourceFile, number: int, offset: int) -> Iterator[Row]:  # noqa: ARG001  rows have no offset here
    """Yield the rows from ``number`` on. Row groups before it are skipped without being read."""
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            yield from _rows(source, file, number)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{source.path} cannot be read as parquet ({error}). Fetch or write the file again") from error


def stored_text_bytes(source: SourceFile) -> int:
    """Return about the size of the text: that of the column before compression, from the file's footer."""
    try:
        metadata = pyarrow.parquet.read_metadata(source.path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{source.path} cannot be read as parquet ({error}). Fetch or write the file again") from error
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == "text")


def require_columns(source: SourceFile, types: Mapping[str, str]) -> None:
    """Raise InputError unless a file has columns of these types."""
    try:
        schema = pyarrow.parquet.read_schema(source.path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{source.path} cannot be read as parquet ({error}). Fetch or write the file again") from error
    found = {column.name: str(column.type) for column in schema}
    if not types.items() <= found.items():
        wanted = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise InputError(
            f"{source.path} has the columns {_types(schema)}, but should have {wanted}. It is not a file of the text "
            "that the name stands for: name the files by their URL, if they are what you want"
        )


def _rows(source: SourceFile, file: pyarrow.parquet.ParquetFile, number: int) -> Iterator[Row]:
    columns = _columns(source, file.schema_arrow)
    group, row = 0, 0
    while group < file.num_row_groups and row + file.metadata.row_group(group).num_rows <= number:
        row += file.metadata.row_group(group).num_rows
        group += 1
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=list(range(group, file.num_row_groups)), columns=columns):
        for values in batch.to_pylist():
            if row >= number:
                name = id_at(values.get("id"), source, row)
                yield Row(row, 0, Passage(name, str(values.get("title") or ""), values["text"] or ""))
            row += 1


def _columns(source: SourceFile, schema: pyarrow.Schema) -> list[str]:
    found = {name: str(schema.field(name).type) for name in READ_COLUMNS if schema.names.count(name) == 1}
    if found.get("text") not in ("string", "large_string"):
        raise InputError(
            f"{source.path} needs one string column named 'text', but has the columns {_types(schema)}. Write the file "
            "again with such a column, or choose other files (corpus.source)"
        )
    return list(found)


def _types(schema: pyarrow.Schema) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in schema)
