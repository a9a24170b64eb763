"""Reads the embeddings of passages from .parquet files: the column ``embeddings``, a list of numbers in each row.

Rows are numbered over all files of a source, in the order of their names, as in the FAISS indexes of datasets.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from t5train.data.download.source_listing import few
from t5train.data.formats.parquet import batches, open_parquet
from t5train.data.passages import SourceFile
from t5train.data.sources import require_source
from t5train.errors import InputError
from t5train.progress import Progress, silent
from t5train.quantities import quantity
from t5train.records.locations import redacted
from t5train.spec.known_texts import BUILT_IN

COLUMN = "embeddings"
CHUNK_ROWS = 8192
_BUFFER_BYTES = 4 << 20
"""Files are read in pieces of this size, because a row group may be as large as its file."""
_AGAIN = "Fetch or write the file again"


class EmbeddingFile(NamedTuple):
    """A file with embeddings, and the numbers of its rows."""

    source: SourceFile
    first_row: int
    rows: int


class Embeddings(NamedTuple):
    """All embeddings of a source."""

    files: tuple[EmbeddingFile, ...]
    dimension: int

    @property
    def rows(self) -> int:
        """The number of passages."""
        return sum(each.rows for each in self.files)


def require_embeddings(source: str, revision: str, root: Path) -> None:
    """Raise InputError unless a source exists and has only .parquet files. Downloads nothing."""
    if source == BUILT_IN:
        raise InputError(f"{source} has no embeddings. Name .parquet files that have some")
    names = require_source(source, revision, root, whole_files=True).sizes
    others = [name for name in names if not name.endswith(".parquet")]
    if others:
        raise InputError(
            f"{redacted(source)} has {quantity(len(others), 'file')} in other formats than .parquet, which have no "
            f"embeddings: {few(others)}. Name .parquet files only, for example with a pattern"
        )


def embeddings_of(sources: Sequence[SourceFile]) -> Embeddings:
    """Return the embeddings of a source. Reads the ends of the files, and the first row.

    Raises InputError if a file has no column of embeddings, or if there are no rows.
    """
    files: list[EmbeddingFile] = []
    total = 0
    for source in sources:
        rows = _rows_of(source)
        files.append(EmbeddingFile(source, total, rows))
        total += rows
    first = next((each for each in files if each.rows), None)
    if first is None:
        raise InputError(f"{', '.join(str(each.path) for each in sources[:3])}: there are no rows. Name other files")
    return Embeddings(tuple(files), _first_width(first))


def chunks(
    embeddings: Embeddings, chunk_rows: int = CHUNK_ROWS, progress: Progress = silent, what: str = "embeddings read"
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield all embeddings in order: the number of the first row, and float32 [at most chunk_rows, dimension].

    Raises InputError if a row has none, one of another width, or one with a number that is not finite.
    """
    for each in embeddings.files:
        row = each.first_row
        for batch in _batches(each, chunk_rows):
            vectors = _matrix(each, row - each.first_row, batch, embeddings.dimension)
            yield row, vectors
            row += len(vectors)
            progress(what, row, embeddings.rows)


def rows_at(embeddings: Embeddings, rows: np.ndarray) -> np.ndarray:
    """Return the embeddings of rows, which are sorted. Only row groups that have one of them are read."""
    found: list[np.ndarray] = []
    for each in embeddings.files:
        inside = rows[(rows >= each.first_row) & (rows < each.first_row + each.rows)] - each.first_row
        if len(inside):
            found.extend(_rows_in(each, inside, embeddings.dimension))
    return np.concatenate(found) if found else np.empty((0, embeddings.dimension), np.float32)


def spread_rows(total: int, count: int, seed: int) -> np.ndarray:
    """Return ``count`` of ``total`` rows, sorted: one at random from each of as many ranges of equal size."""
    count = min(count, total)
    edges = np.linspace(0, total, count + 1).astype(np.int64)
    return np.asarray(np.random.Generator(np.random.PCG64(seed)).integers(edges[:-1], edges[1:]))


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1, float32; those of length 0 stay as they are."""
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)


def _rows_in(each: EmbeddingFile, rows: np.ndarray, dimension: int) -> Iterator[np.ndarray]:
    """Yield the embeddings of rows of a file, whose numbers begin at 0 here."""
    row = 0
    with _opened(each) as file:
        for group in range(file.num_row_groups):
            end = row + file.metadata.row_group(group).num_rows
            if ((rows >= row) & (rows < end)).any():
                for batch in _read(each, file, CHUNK_ROWS, [group]):
                    wanted = rows[(rows >= row) & (rows < row + len(batch))]
                    if len(wanted):
                        yield _matrix(each, row, batch, dimension)[wanted - row]
                    row += len(batch)
            row = end


def _rows_of(source: SourceFile) -> int:
    with open_parquet(source.path) as file:
        schema = file.schema_arrow
        kind = schema.field(COLUMN).type if schema.names.count(COLUMN) == 1 else None
        if not _is_list_of_floats(kind):
            columns = ", ".join(f"{column.name} ({column.type})" for column in schema)
            raise InputError(
                f"{source.shown} needs one column named {COLUMN!r} with a list of floating-point numbers in each row, "
                f"but has the columns {columns}. Name files with embeddings"
            )
        return int(file.metadata.num_rows)


def _is_list_of_floats(kind: Any) -> bool:
    types = pyarrow.types
    is_list = kind is not None and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
    return bool(is_list and types.is_floating(kind.value_type))


def _first_width(each: EmbeddingFile) -> int:
    column = next(_batches(each, 1))
    width = pyarrow.compute.list_value_length(column)[0].as_py()
    if not width:
        raise InputError(f"{each.source.shown} row 0 has no embedding. {_AGAIN}")
    return int(width)


def _opened(each: EmbeddingFile) -> AbstractContextManager[pyarrow.parquet.ParquetFile]:
    return open_parquet(each.source.path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def _batches(each: EmbeddingFile, rows: int) -> Iterator[Any]:
    with _opened(each) as file:
        yield from _read(each, file, rows, list(range(file.num_row_groups)))


def _read(each: EmbeddingFile, file: pyarrow.parquet.ParquetFile, rows: int, groups: list[int]) -> Iterator[Any]:
    """Yield the column of row groups in arrays of at most so many rows."""
    found = batches(each.source.path, file, rows, groups, [COLUMN], use_threads=False)
    return (batch.column(0) for batch in found)


def _matrix(each: EmbeddingFile, row: int, column: Any, dimension: int) -> np.ndarray:
    """Return the embeddings of an array as float32 [rows, dimension]; ``row`` is its first row in the file."""
    widths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    if (bad := np.flatnonzero(widths != dimension)).size:
        raise InputError(
            f"{each.source.shown} row {row + bad[0]} has an embedding of {quantity(int(widths[bad[0]]), 'number')}, "
            f"but should have {dimension}, as the source's first row. {_AGAIN}"
        )
    # Missing numbers become NaN.
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    vectors = values.reshape(-1, dimension)
    if (bad := np.flatnonzero(~np.isfinite(vectors).all(axis=1))).size:
        raise InputError(
            f"{each.source.shown} row {row + bad[0]} has an embedding with a number that is missing or not finite. "
            f"{_AGAIN}"
        )
    return np.asarray(vectors)
