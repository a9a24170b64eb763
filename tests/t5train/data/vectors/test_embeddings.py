"""Embeddings are read in order, whatever the chunks, and a malformed one is refused with its file and row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.passages import SourceFile
from t5train.data.vectors.embeddings import Embeddings, chunks, embeddings_of, rows_at, spread_rows
from t5train.errors import InputError
from tests.support.embedded_passages import embedded_passages, embeddings_in, write_parquet

PASSAGES = embedded_passages(401)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("embeddings") / "text", PASSAGES)


@pytest.mark.parametrize("chunk_rows", [1, 7, 150, 10_000])
def test_all_embeddings_are_read_in_order_whatever_the_chunks(folder: Path, chunk_rows: int) -> None:
    embeddings = embeddings_in(folder)
    assert (embeddings.rows, embeddings.dimension) == PASSAGES.vectors.shape
    read = list(chunks(embeddings, chunk_rows))
    assert max(len(vectors) for _, vectors in read) <= chunk_rows
    assert [row for row, _ in read] == np.cumsum([0, *(len(vectors) for _, vectors in read[:-1])]).tolist()
    assert (np.concatenate([vectors for _, vectors in read]) == PASSAGES.vectors).all()


@pytest.mark.parametrize("count", [1, 20, 401, 1000])
def test_sampled_rows_are_those_of_the_whole(folder: Path, count: int) -> None:
    rows = spread_rows(401, count, 3)
    assert (rows_at(embeddings_in(folder), rows) == PASSAGES.vectors[rows]).all()


@given(total=st.integers(1, 10_000), count=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_a_sample_is_sorted_without_repetition_and_spread_evenly(total: int, count: int, seed: int) -> None:
    rows = spread_rows(total, count, seed)
    assert len(rows) == min(total, count)
    assert (np.diff(rows) > 0).all()
    assert 0 <= rows[0] <= rows[-1] < total
    assert np.diff(rows, prepend=0, append=total).max() <= 2 * -(-total // len(rows))
    assert (rows == spread_rows(total, count, seed)).all()


def embeddings_with(folder: Path, column: Any, name: str = "embeddings") -> Embeddings:
    path = folder / "train.parquet"
    table = pyarrow.table({"id": ["1"] * len(column), "text": ["text"] * len(column), name: column})
    pyarrow.parquet.write_table(table, path)
    return embeddings_of([SourceFile(path, path.name)])


NAN = [float("nan"), 1.0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[1.0, 2.0], [1.0]], "row 1 has an embedding of 1 number, but should have 2"),
        ([[1.0, 2.0]] * 3 + [[1.0, 2.0, 3.0]], "row 3 has an embedding of 3 numbers, but should have 2"),
        ([[1.0, 2.0], None], "row 1 has an embedding of 0 numbers"),
        ([[1.0, 2.0], [], [1.0, 2.0, 3.0, 4.0]], "row 1 has an embedding of 0 numbers"),
        ([[1.0, 2.0], NAN], "row 1 has an embedding with a number that is missing or not finite"),
        ([[1.0, 2.0], [1.0, float("inf")]], "row 1 has an embedding with a number that is missing or not finite"),
        ([[1.0, 2.0], [None, 1.0]], "row 1 has an embedding with a number that is missing or not finite"),
    ],
)
def test_a_malformed_embedding_is_refused_with_its_row(tmp_path: Path, values: list[Any], said: str) -> None:
    embeddings = embeddings_with(tmp_path, pyarrow.array(values, pyarrow.list_(pyarrow.float32())))
    for chunk_rows in (1, 100):
        with pytest.raises(InputError, match=said):
            list(chunks(embeddings, chunk_rows))


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_lists_of_any_floating_point_type_are_read_as_float32(tmp_path: Path, kind: Any, is_fixed: bool) -> None:
    values = [np.array([0.5, row], kind.to_pandas_dtype()) for row in range(4)]
    embeddings = embeddings_with(tmp_path, pyarrow.array(values, pyarrow.list_(kind, 2 if is_fixed else -1)))
    ((_, vectors),) = chunks(embeddings)
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[0.5, row] for row in range(4)]


def test_files_without_embeddings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs one column named 'embeddings' .* has the columns id \(string\)"):
        embeddings_with(tmp_path, pyarrow.array([[1.0]]), name="vectors")
    with pytest.raises(InputError, match="needs one column named 'embeddings'"):
        embeddings_with(tmp_path, pyarrow.array([[1], [2]]))
    with pytest.raises(InputError, match="there are no rows"):
        embeddings_with(tmp_path, pyarrow.array([], pyarrow.list_(pyarrow.float32())))
    with pytest.raises(InputError, match="row 0 has no embedding"):
        embeddings_with(tmp_path, pyarrow.array([None], pyarrow.list_(pyarrow.float32())))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 is not enough PAR1")
    with pytest.raises(InputError, match="cannot be read as parquet"):
        embeddings_of([SourceFile(tmp_path / "x.parquet", "x.parquet")])


def test_a_page_that_differs_from_its_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    column = [[float(row), 1.0] for row in range(900)]
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(pyarrow.table({"embeddings": column}), path, row_group_size=300, **options)
    content, number = path.read_bytes(), np.float64(500).tobytes()
    assert content.count(number) == 1
    path.write_bytes(content.replace(number, np.float64(501).tobytes()))
    embeddings = embeddings_of([SourceFile(path, path.name)])
    for reading in (lambda: list(chunks(embeddings)), lambda: rows_at(embeddings, np.array([10, 800, 510]))):
        with pytest.raises(InputError, match=r"train\.parquet cannot be read as parquet from row \d+ on \(.*CRC"):
            reading()
