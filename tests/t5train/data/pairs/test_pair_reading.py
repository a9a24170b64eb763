"""Pairs are read from every format as they were written, and what is no pair of texts is refused by its place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.pairs.pair_reading import pair_rows
from t5train.data.passages import SourceFile
from t5train.data.readers import OpenFile
from t5train.errors import InputError
from t5train.spec.pairs_spec import PairSource

PAIRS = [("one, two", "unu, doi"), ('say "hi"', 'spune "salut"'), ("ünïcode", "日本語 ș")]
FLAT = PairSource("", "")
NESTED = PairSource("", "", source="translation.en", target="translation.ro")


def read(path: Path, columns: PairSource = FLAT) -> list[tuple[str, str]]:
    with OpenFile() as opened:
        return [(row.source, row.target) for row in pair_rows(SourceFile(path, path.name), columns, opened)]


def as_csv(pairs: list[tuple[str, str]], end: str = "\n") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows([("id", "source", "target"), *((7, *pair) for pair in pairs)])
    return text.getvalue().encode()


def as_tsv(pairs: list[tuple[str, str]]) -> bytes:
    return "".join(f"{target}\t{source}\n" for source, target in [("source", "target"), *pairs]).encode()


def as_lines(pairs: list[tuple[str, str]]) -> bytes:
    return b"".join(json.dumps({"source": one, "target": other}).encode() + b"\n" for one, other in pairs)


def as_parquet(pairs: list[tuple[str, str]]) -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"source": [one for one, _ in pairs], "n": [1] * 3, "target": [other for _, other in pairs]})
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", as_lines(PAIRS)),
        ("a.tsv", as_tsv(PAIRS)),
        ("a.csv", as_csv(PAIRS)),
        ("bom.csv", b"\xef\xbb\xbf" + as_csv(PAIRS, "\r\n")),
        ("a.parquet", as_parquet(PAIRS)),
        ("a.jsonl.gz", gzip.compress(as_lines(PAIRS))),
        ("a.csv.bz2", bz2.compress(as_csv(PAIRS))),
        ("a.tsv.xz", lzma.compress(as_tsv(PAIRS))),
        ("a.jsonl.zst", zstd.compress(as_lines(PAIRS))),
        ("blank.jsonl", as_lines(PAIRS).replace(b"\n", b"\n \n")),
    ],
)
def test_each_format_gives_the_pairs_that_were_written(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == PAIRS


@given(pairs=st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))] * 2)))
def test_csv_survives_commas_quotes_and_line_ends_in_fields(pairs: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("source", "target"), *pairs])
        path = Path(folder, "a.csv")
        path.write_bytes(text.getvalue().encode())
        assert read(path) == pairs


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_may_be_nested_and_null_is_empty(tmp_path: Path, suffix: str) -> None:
    rows = [{"translation": {"en": "a", "de": "x", "ro": "b"}}, {"translation": {"en": None, "de": "", "ro": "c"}}]
    rows += [{"translation": None}]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(path, NESTED) == [("a", "b"), ("", "c"), ("", "")]


def test_a_flat_column_may_have_a_name_with_a_dot(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"translation.en": "a", "translation": {"ro": "b"}}')
    assert read(tmp_path / "a.jsonl", NESTED) == [("a", "b")]


def table(**columns: list[object]) -> Callable[[Path], object]:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"source": "a", "target": "b"}\n{"source": "a", "tarjet": "b"}', "line 2 has no column 'target'"),
        ("a.jsonl", b'{"source": "a", "tarjet": "b"}', "only source, tarjet (did you mean 'tarjet'?). Choose columns"),
        ("a.jsonl", b'{"translation": {"source": "a", "target": "b"}}', "did you mean 'translation.source'?"),
        ("a.jsonl", b'{"source": "a", "target": 3}', "line 1: 'target' holds int and not text"),
        ("a.jsonl", b'["a", "b"]', "line 1 is not an object"),
        ("a.jsonl", b'{"source": "a', "line 1 is not JSON"),
        ("a.jsonl", b'[\n{"source": "a", "target": "b"}\n]', "To write an array as lines of objects, use jq -c '.[]'"),
        ("a.jsonl", b'\n{"source": "\xff", "target": "b"}', "line 2 is not UTF-8: byte 13 of the text is 0xff"),
        ("a.jsonl", b'{"source": "\0"}', "line 1 has a NUL byte"),
        ("a.jsonl.gz", gzip.compress(as_lines(PAIRS))[:-9], "cannot be read to its end"),
        ("a.csv", b"source,targe\na,b\n", "line 1, the header, has no column 'target', only source, targe (did you"),
        ("a.csv", b"source;target\na;b\n", "line 1, the header, split at commas, has no column 'source'"),
        ("a.csv", b"", "has no column 'source', no columns at all"),
        ("a.csv", b"source,target,source\n", "more than one column 'source'"),
        ("a.csv", b'source,target\n"a,b\n', "record 2, which begins at byte 14 of the text, is not CSV"),
        ("a.csv", b"source,target\na,b,c\n", "record 2 has 3 fields, but the header has 2"),
        ("a.tsv", b'source\ttarget\n"a\nb"\tc\n', "line 2 has 1 field separated by tabs, but the header has 2"),
        ("a.txt", b"a\tb\n", "has a format without columns"),
        ("a.parquet", b"PAR1", "cannot be read as parquet"),
        ("a.parquet", as_parquet(PAIRS)[:-9] + b"\xff" + as_parquet(PAIRS)[-8:], "cannot be read as parquet"),
        ("a.parquet", table(source=["a"], tgt=["b"]), "has no column 'target', only source, tgt"),
        ("a.parquet", table(source=["a"], target=[1]), "column 'target' holds int64 and not text"),
    ],
)
def test_what_is_no_pair_of_texts_is_refused_by_its_place(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], object], message: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with pytest.raises(InputError) as refused:
        read(path)
    assert message in str(refused.value)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
