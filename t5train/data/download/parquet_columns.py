"""Fetches the columns of a remote .parquet file that are read, if others, such as embeddings, are most of it.

The digest of the whole file cannot be compared then. The copy is a .parquet file of its own, whose digest is noted.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t5train.errors import InputError

_LEAST_SAVED = 0.5
"""Share of the file that must not be needed."""
_MOST_WASTE = 1.5
"""Columns of a row group are fetched with one request if the range from the first to the last is at most so many times
their size."""
_MOST_GROUP_BYTES = 64 << 20
"""Of text in a row group: one is in memory as a whole, for each connection."""
_FOOTER_BYTES = 64 << 10
"""Read first, because the description of the file is at its end; a longer one takes another request."""
ReadRange = Callable[[int, int], bytes]
"""Returns the bytes from a start to before an end."""


class Columns(NamedTuple):
    """The columns of a file that are to be fetched."""

    names: tuple[str, ...]
    size_bytes: int
    """As stored."""


class _RemoteBytes(io.RawIOBase):
    """A remote file as a seekable stream. ``keep`` fetches a range at once, for reads within it."""

    def __init__(self, read_range: ReadRange, size_bytes: int) -> None:
        self._read_range, self._size = read_range, size_bytes
        self._position = 0
        self.keep(max(0, size_bytes - _FOOTER_BYTES), size_bytes)

    def keep(self, start: int, end: int) -> None:
        """Fetch the bytes from ``start`` to before ``end``."""
        self._kept_from, self._kept = start, self._read_range(start, end)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, relative_to: int = io.SEEK_SET, /) -> int:
        """Set the position in bytes, as ``io.IOBase.seek`` does, and return it."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = bases[relative_to] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as fit into ``buffer``, and return their number."""
        start, end = self._position, min(self._position + len(buffer), self._size)
        if start >= end:
            return 0
        first = start - self._kept_from
        is_kept = first >= 0 and first + end - start <= len(self._kept)
        buffer[: end - start] = self._kept[first : first + end - start] if is_kept else self._read_range(start, end)
        self._position = end
        return end - start


def needed_columns(read_range: ReadRange, size_bytes: int, wanted: Sequence[str]) -> Columns | None:
    """Return the columns to fetch; None if the whole file is to be fetched, as it is if it cannot be read."""
    import pyarrow  # slow to import, and only needed for this format
    from pyarrow.parquet import ParquetFile

    from t5train.data.formats.parquet import holds_several

    try:
        with ParquetFile(_RemoteBytes(read_range, size_bytes)) as file:
            if holds_several(file.metadata, size_bytes, read_range):
                return None
            schema = file.schema_arrow
            found = [each for each in wanted if each in schema.names]
            if any(schema.names.count(each) > 1 for each in found):  # refused when the whole file is read
                return None
            # Nested columns are several sequences of values in the file.
            names = tuple(each for each in found if not schema.field(each).type.num_fields)
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    except pyarrow.ArrowException:
        return None
    if "text" not in names or max(map(_text_bytes, groups), default=0) > _MOST_GROUP_BYTES:
        return None
    size = sum(end - start for group in groups for start, end in _chunks(group, names))
    return Columns(names, size) if size < (1 - _LEAST_SAVED) * size_bytes else None


def fetch_columns(read_range: ReadRange, size_bytes: int, columns: Columns, out: Path) -> None:
    """Write a .parquet file with these columns to ``out``. Raises InputError if the remote one is malformed."""
    import pyarrow
    from pyarrow.parquet import ParquetFile, ParquetWriter

    remote = _RemoteBytes(read_range, size_bytes)
    try:
        with ParquetFile(remote, page_checksum_verification=True) as file:
            schema = pyarrow.schema([file.schema_arrow.field(name) for name in columns.names])
            with ParquetWriter(out, schema, compression="zstd") as writer:
                for number in range(file.num_row_groups):
                    _keep_columns(remote, file.metadata.row_group(number), columns.names)
                    writer.write_table(file.read_row_group(number, columns=list(columns.names)))
    except pyarrow.ArrowException as error:
        raise InputError(f"{out.name} cannot be read as parquet where it is stored ({error})") from error


def _text_bytes(group: Any) -> int:
    """Return the size of a row group's text before compression."""
    columns = [group.column(number) for number in range(group.num_columns)]
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == "text")


def _keep_columns(remote: _RemoteBytes, group: Any, names: Sequence[str]) -> None:
    chunks = _chunks(group, names)
    start, end = min(each[0] for each in chunks), max(each[1] for each in chunks)
    if end - start <= _MOST_WASTE * sum(each[1] - each[0] for each in chunks):
        remote.keep(start, end)


def _chunks(group: Any, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return where the columns of a row group begin and end in the file."""
    from t5train.data.formats.parquet import column_chunks

    return [(start, end) for name, start, end in column_chunks(group) if name in names]
