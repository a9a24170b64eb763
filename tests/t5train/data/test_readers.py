"""Rows of every format, and the errors for malformed files."""

import bz2
import errno
import gzip
import io
import json
import lzma
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import encryption

from t5train.data import readers
from t5train.data.formats.passage_frames import FRAMES, PassageFrames
from t5train.data.passages import Passage, SourceFile
from t5train.data.readers import format_of, rows
from t5train.data.segments import passages_in, passages_of, scan
from t5train.errors import InputError

pytestmark = pytest.mark.usefixtures("quick_workers")

LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\t\0"), max_size=40)
ID = LINE.filter(str.strip)  # a blank one does not count
UNTYPED_ID = ID.filter(lambda name: not name.endswith(".0") and name.lower() != "nan")  # these are read as numbers
PASSAGES = st.lists(st.tuples(UNTYPED_ID, LINE, LINE), max_size=20)


def source(path: Path, content: bytes | None = None) -> SourceFile:
    if content is not None:
        path.write_bytes(content)
    return SourceFile(path, path.name)


def read(path: Path, content: bytes | None = None) -> list[Passage]:
    return [row.passage for row in rows(source(path, content))]


def texts_in(path: Path, content: bytes) -> list[str]:
    return [passage.text for passage in read(path, content)]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def parquet(table: dict[str, Any] | pyarrow.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table) if isinstance(table, dict) else table, file, **options)
    return file.getvalue()


def columns(*names: str) -> pyarrow.Table:
    return pyarrow.table([["one"]] * len(names), names=names)


class Keys(encryption.KmsClient):
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:  # noqa: ARG002 - pyarrow passes both
        return b64encode(key_bytes)


def encrypted_parquet() -> bytes:
    settings = encryption.EncryptionConfiguration(footer_key="key", column_keys={"key": ["text"]})
    factory, connection = encryption.CryptoFactory(lambda _: Keys()), encryption.KmsConnectionConfig()
    properties = factory.file_encryption_properties(connection, settings)
    return parquet({"text": ["one"]}, encryption_properties=properties)


def parquet_that_is_not_utf_8() -> bytes:
    values = pyarrow.array([b"one", None, b"tw\xff", b"three"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(values), values.buffers())
    return parquet({"text": text}, row_group_size=2)


def parquet_with_a_damaged_page() -> bytes:
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    content = parquet({"text": [f"passage {row}" for row in range(900)]}, row_group_size=300, **options)
    return content.replace(b"passage 500", b"passafe 500")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (parquet({"id": ["1"], "text": [3]}), r"needs one string column named 'text', .* id \(string\), text \(int64"),
        (parquet(columns("text", "text")), r"has the columns text \(string\), text \(string\)"),
        # Without ids, passages of one document could be in two splits.
        (parquet(columns("text", "id", "id")), r"a\.parquet has more than one column 'id'"),
        (parquet({"text": ["a"]}) + parquet({"text": ["b"]}), "files one after another, of which only the last"),
        (encrypted_parquet(), r"\(.*decrypt.*\)\. Write the file again without encryption"),
        (parquet_that_is_not_utf_8(), r"a\.parquet, row 2: column 'text' is not UTF-8, .*: byte 2 is 0xff\. Convert"),
        (parquet({"text": ["x" * 1000]})[:-30], r"a\.parquet cannot be read as parquet"),
        (parquet_with_a_damaged_page(), r"a\.parquet cannot be read as parquet from row \d+ on \(.*CRC .* page"),
    ],
    ids=["no text", "two texts", "two ids", "two files", "encrypted", "not UTF-8", "truncated", "damaged page"],
)
def test_an_invalid_parquet_file_is_refused_with_the_cause(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(tmp_path / "a.parquet", content)


def compressed_as(name: str, content: bytes) -> bytes:
    return PACKED.get(Path(name).suffix, bytes)(content)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns paths without a file. They are removed first: some file systems write replaced content to disk."""
    folder = tmp_path_factory.mktemp("readers")

    def path_of(name: str) -> Path:
        (folder / name).unlink(missing_ok=True)
        return folder / name

    return path_of


@given(PASSAGES)
def test_jsonl_is_read_back_as_written(new: Callable[[str], Path], passages: list[tuple[str, str, str]]) -> None:
    path = new("a.jsonl")
    path.write_text("".join(json.dumps({"id": i, "title": t, "text": x}) + "\n" for i, t, x in passages), "utf-8")
    assert read(path) == [Passage(*passage) for passage in passages]


@given(PASSAGES)
def test_quoted_tsv_is_read_back_as_written(new: Callable[[str], Path], passages: list[tuple[str, str, str]]) -> None:
    path = new("a.tsv")
    lines = ["\t".join(map(quoted, (i, x, t))) for i, t, x in passages]
    path.write_bytes("\n".join(["id\ttext\ttitle", *lines]).encode())
    assert read(path) == [Passage(*passage) for passage in passages]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


TEXT_TYPES = [pyarrow.string_view(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())]
TEXTS = [pyarrow.array(["one", "two", None]).cast(kind) for kind in TEXT_TYPES]
LONG = "word " * 100_000
COLUMNS = {"id": [7, 8], "embedding": [[0.5], [0.25]], "title": ["T", None], "text": ["one", "two"]}
FIELDS = {'"He said" and "she"': '"He said" and "she"', '"a ""b"" c"': 'a "b" c', '"unclosed': '"unclosed'}
FIELDS |= {'"""': '"""', '""""': '"', '""': ""}
TSV = "id\ttext\ttitle\n" + "".join(f"1\t{field}\tt\n" for field in FIELDS)


@pytest.mark.parametrize(
    ("name", "content", "passages"),
    [
        ("a.parquet", parquet(COLUMNS), ["7|T|one", "8||two"]),
        (
            "a.jsonl",
            b'{"id": null, "text": "1"}\n{"text": "2"}\n{"id": 0, "text": "3"}\n',
            ["a:0||1", "a:1||2", "0||3"],
        ),
        ("a.csv", b'id,text\nNaN,1\nnan,2\n"nan",3\n', ["a:1||1", "a:2||2", "a:3||3"]),
        ("a.tsv", b'id\ttext\ttitle\nNaN\t1\t\n"nan"\t2\t\n', ["a:1||1", "a:2||2"]),
        ("a.parquet", parquet({"title": [float("nan"), 2.5], "text": ["1", "2"]}), ["a:0||1", "a:1|2.5|2"]),
        ("a.jsonl", '{"id": 123456789012345678901, "text": "1"}'.encode("utf-8-sig"), ["123456789012345678901||1"]),
        ("a.txt", "\ufeffone\r\n\n  two é\n".encode(), ["a:0||one", "a:1||", "a:2||two é"]),
        ("a.txt.zst", b"\x50\x2a\x4d\x18\4\0\0\0skip", []),
        ("a.tsv", TSV.encode(), [f"1|t|{text}" for text in FIELDS.values()]),
        (
            "a.csv",
            f'\ufefftext,author\r\n"one, ""two""\r\n\nthree",a\r\n\r\n,b\r\n{LONG},c'.encode(),
            ['a:1||one, "two"\r\n\nthree', "a:2||", "a:3||", f"a:4||{LONG}"],
        ),
        *(("a.parquet", parquet({"id": each, "text": each}), ["one||one", "two||two", "a:2||"]) for each in TEXTS),
    ],
    ids=[
        *("only three columns are read", "no id", "NaN as id in csv", "NaN as id in tsv", "NaN as title"),
        *("long id after a byte order mark", "blank line", "only a skippable frame", "quotes in tsv"),
        *("csv of spreadsheets", "string_view", "large_string", "dictionary"),
    ],
)
def test_a_file_holds_these_passages(tmp_path: Path, name: str, content: bytes, passages: list[str]) -> None:
    """Each is written as ID|TITLE|TEXT. A passage without an id is identified by its file and row, as ``a:ROW``."""
    found = [re.sub(rf"^{name}:", "a:", "|".join(each)) for each in read(tmp_path / name, content)]
    assert found == passages


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.parquet", "a.csv", "a.csv.gz", "a.csv.xz"])
def test_segments_cut_a_file_without_losing_or_repeating_a_row(tmp_path: Path, name: str) -> None:
    """Those of CSV begin at records and not at lines."""
    texts = [f"{number} {'word ' * (number % 50)}".strip() if number % 7 else "" for number in range(5000)]
    if name.startswith("a.csv"):
        texts = [text and f"{text},\n" + '"word"\n' * (number % 50) for number, text in enumerate(texts)]
        content = "\n".join(["title,text", *(f"a,{quoted(text)}" for text in texts)]).encode()
    else:
        content = "\n".join(texts).encode()
    packed = parquet({"text": texts}, row_group_size=700) if name == "a.parquet" else compressed_as(name, content)
    file = source(tmp_path / name, packed)
    scanned = scan(file)
    assert len(scanned.segments) > 5
    assert scanned.empty_passages == sum(not text for text in texts)
    found = [passage.text for segment in scanned.segments for passage in passages_of(file, segment)]
    assert found == [text for text in texts if text]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst"])
def test_segments_in_their_order_decompress_a_file_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number} {'word ' * (number % 50)}".strip() for number in range(8_000)]
    packed = source(tmp_path / name, compressed_as(name, "\n".join(texts).encode()))
    of_file = [(packed, segment) for segment in scan(packed).segments]
    times = []
    decompressed = readers._decompressed
    monkeypatch.setattr(readers, "_decompressed", lambda *file: times.append(1) or decompressed(*file))
    assert [passage.text for passage in passages_in(of_file)] == texts
    assert len(list(passages_in(of_file[::3]))) < len(texts) / 2
    assert len(times) == 2
    assert sorted(passage.text for passage in passages_in(of_file[::-1])) == sorted(texts)


@pytest.mark.parametrize("is_truncated", [False, True])
def test_decompressing_up_to_a_segment_reports_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_truncated: bool
) -> None:
    path = tmp_path / "a.txt.bz2"
    texts = [f"{number} {'word ' * (number % 50)}".strip() for number in range(8_000)]
    last = scan(source(path, bz2.compress("\n".join(texts).encode()))).segments[-1]
    monkeypatch.setattr(readers, "_SEEK_BYTES", 100_000)
    if is_truncated:
        path.write_bytes(bz2.compress("\n".join(texts[:1000]).encode()))
    steps: list[int] = []
    found = list(passages_in([(source(path), last)], lambda: steps.append(1)))
    assert len(steps) == (last.offset - 1) // 100_000
    assert [passage.text for passage in found] == ([] if is_truncated else texts[-last.rows :])


def test_frames_hold_the_same_passages_and_each_segment_is_read_alone(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} " * (number % 60)}) for number in range(8_000)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    with open(tmp_path / f"a{FRAMES}", "wb") as file:
        framed = scan(source(path), PassageFrames(file))
    of_file = scan(source(path))
    assert [each._replace(offset=0) for each in framed.segments] == [
        each._replace(offset=0) for each in of_file.segments
    ]
    place = SourceFile(tmp_path / f"a{FRAMES}", "a.jsonl.gz")
    for segment, framed_segment in zip(of_file.segments[::-1], framed.segments[::-1], strict=True):
        assert list(passages_of(place, framed_segment)) == list(passages_of(source(path), segment))
    assert scan(place).segments == framed.segments, "frames that are scanned are segments, read from where they begin"


def test_frames_that_end_early_are_refused(tmp_path: Path) -> None:
    place = SourceFile(tmp_path / f"a{FRAMES}", "a")
    with open(place.path, "wb") as file:
        frames = PassageFrames(file)
        for number in range(3):
            frames.add(Passage(str(number), "", "text " * 1000))
            frames.end_frame()
    place.path.write_bytes(place.path.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"cannot be read to its end \(its last frame is incomplete\)"):
        list(rows(place))


def test_a_scan_reports_how_far_it_has_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"%x\n" % hash(str(number)) for number in range(300_000))))
    reported: list[int] = []
    scan(source(path), advance=reported.append)
    assert len(reported) > 10
    assert sum(reported) == path.stat().st_size
    assert max(reported) < path.stat().st_size / 2


def test_formats_are_recognised_by_file_name() -> None:
    assert format_of("x/a.b.jsonl.gz") == ".jsonl"
    assert format_of("a.parquet") == ".parquet"
    assert format_of("a.parquet.gz") is None
    assert format_of("a.csv.zst") == ".csv"
    assert format_of("a.xlsx") is None
    assert format_of("README") is None


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own limit: libraries that other tests use raise it, and JSON may then be nested more deeply."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


DEEP_JSON = b'{"id": 1e30, "text": "x", "more": ' + b"[" * 999 + b"]" * 999 + b"}\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"fine\nbad \xff\n", ["a.txt line 2", "byte 9", "0xff", "UTF-8"]),
        ("a.txt", b"one\rtwo\r", ["a.txt has carriage returns", "Convert its line ends to LF"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["a.jsonl line 2", "not JSON"]),
        ("a.jsonl", b'{"body": "x"}\n', ["a.jsonl line 1", '"text"']),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["a.jsonl line 1", "surrogate"]),
        ("a.tsv", b"text\tid\n", ["a.tsv", "header", "id\\ttext\\ttitle"]),
        ("a.tsv", b"id\ttext\ttitle\n1\ttwo\n", ["a.tsv line 2", "2 fields"]),
        ("a.txt.gz", gzip.compress(b"x" * 100_000, mtime=0)[:-20], ["a.txt.gz", "cannot be read to its end"]),
        ("a.parquet", b"PAR1 and no more", ["a.parquet", "parquet"]),
        ("a.xlsx", b"", ["a.xlsx", ".jsonl"]),
        ("a.csv", b"", ["a.csv begins with ''", "a header that names one column 'text'"]),
        ("a.csv", b"id;text\n1;two\n", ["a.csv begins with 'id;text'", "separated by commas"]),
        ("a.csv", b"id,text,id\n1,one,2\n", ["a.csv begins with 'id,text,id'", "may name one 'id'"]),
        ("a.jsonl", DEEP_JSON, ["a.jsonl line 1 is not JSON", "nested too deeply"]),
        ("a.jsonl", b'["text"]\n', ["a.jsonl line 1", '"text"']),
        ("a.csv", b"text,text\n", ["a.csv begins with 'text,text'", "one column 'text'"]),
        ("a.csv", b"id,text\n1,two, three\n", ["a.csv record 2 has 3 fields", "the header has 2"]),
        ("a.csv", b"id,text\n1\n", ["a.csv record 2 has 1 field", "the header has 2"]),
        ("a.csv", b'text\none\n"two', ["a.csv record 3, which begins at byte 9 ", "unexpected end of data"]),
        ("a.csv", b'text\n"a" b\n', ["a.csv record 2, which begins at byte 5 ", "is doubled"]),
        ("a.csv", b"text\none\rtwo\n", ["a.csv record 2", "carriage return"]),
        ("a.csv", b"text\rone\r", ["a.csv record 1", "carriage return", "Convert the line ends of the file to LF"]),
        ("a.csv", b"text\none\0\n", ["a.csv record 2 has a NUL byte", "UTF-16"]),
        ("a.csv", b'text\n"one\ntwo \xff"\n', ["a.csv record 2 is not UTF-8", "byte 14", "0xff"]),
        ("a.csv", "text\none\n".encode("utf-16"), ["a.csv record 1", "UTF-16"]),
        ("a.csv.gz", gzip.compress(b"text\n" * 9, mtime=0)[:-9], ["a.csv.gz", "cannot be read to its end"]),
    ],
)
@pytest.mark.usefixtures("usual_recursion_limit")
def test_an_invalid_file_is_refused_with_the_cause(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        scan(source(tmp_path / name, content))
    assert all(word in str(caught.value) for word in words), str(caught.value)


LONG_LINES = b"first\n" + b"x" * 199_999 + b"\n" + b"y" * 200_000 + b"\n"
OVERLONG = {
    "a.txt": (LONG_LINES, r"a\.txt line 3 has more than 0\.2 MB, .* Split it into lines"),
    "a.txt.gz": (gzip.compress(LONG_LINES), r"a\.txt\.gz line 3 has more than 0\.2 MB, .* Split it into lines"),
    "a.csv": (
        b"text\nfirst\n" + b"x" * 199_990 + b'\n"never closed\n' + b"a line\n" * 100_000,
        r"a\.csv record 4 has more than 0\.2 MB, but a record is one passage",
    ),
    "a.parquet": (
        parquet({"text": ["first", "x" * 200_000, "y" * 200_001]}),
        r"a\.parquet, row 2: the text has more than .* Choose a text in smaller rows",
    ),
}


@pytest.mark.parametrize("name", OVERLONG)
def test_an_overlong_text_is_refused_without_reading_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 200_000)
    content, said = OVERLONG[name]
    found = rows(source(tmp_path / name, content))
    assert next(found).passage.text == "first"
    assert len(next(found).passage.text) >= 199_990
    with pytest.raises(InputError, match=said):
        next(found)


@given(
    st.lists(st.tuples(UNTYPED_ID, *[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))] * 2))
)
def test_csv_is_read_back_as_written_from_every_record(
    new: Callable[[str], Path], passages: list[tuple[str, str, str]]
) -> None:
    path = new("a.csv")
    records = [",".join(map(quoted, (x, "other", i, t))) for i, t, x in passages]
    path.write_bytes("\r\n".join(["text,n,id,title", *records, ""]).encode())
    found = list(rows(source(path)))
    assert [row.passage for row in found] == [Passage(*passage) for passage in passages]
    for row in found:
        assert next(rows(source(path), row.number, row.offset)) == row


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(readers, "open", forbid, raising=False)
    with pytest.raises(InputError, match=r"a\.txt cannot be read: Permission denied; give this user permission"):
        list(rows(source(tmp_path / "a.txt", b"a")))
