"""Rows of every format, and the errors for malformed files."""

import bz2
import gzip
import io
import json
import lzma
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import encryption

from t5train.data import readers
from t5train.data.formats import compressed
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


def source(path: Path) -> SourceFile:
    return SourceFile(path, path.name)


def read(path: Path) -> list[Passage]:
    return [row.passage for row in rows(source(path))]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


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


def test_only_the_three_needed_parquet_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = {"id": [7, 8], "embedding": [[0.5], [0.25]], "title": ["T", None], "text": ["one", "two"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    assert read(path) == [Passage("7", "T", "one"), Passage("8", "", "two")]


def test_a_row_without_an_id_is_identified_by_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": null, "text": "one"}\n{"text": "two"}\n{"id": 0, "text": "three"}\n')
    assert [passage.id for passage in read(path)] == ["a.jsonl:0", "a.jsonl:1", "0"]


@pytest.mark.parametrize("name", ["NaN", "nan", '"nan"'])
def test_an_id_that_is_not_a_number_is_missing_in_a_format_without_types(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_text(f"id,text\n{name},one\n")
    (tmp_path / "a.tsv").write_text(f"id\ttext\ttitle\n{name}\tone\t\n")
    assert [read(tmp_path / each)[0].id for each in ("a.csv", "a.tsv")] == ["a.csv:1", "a.tsv:1"]


def test_a_title_that_is_not_a_number_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"title": [float("nan"), 2.5], "text": ["one", "two"]}), path)
    assert [passage.title for passage in read(path)] == ["", "2.5"]


def test_a_long_id_after_a_byte_order_mark_keeps_its_digits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 123456789012345678901, "text": "one"}\n', encoding="utf-8-sig")
    assert [passage.id for passage in read(tmp_path / "a.jsonl")] == ["123456789012345678901"]


def test_a_line_of_txt_is_a_passage_and_a_blank_line_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\n  two é\n".encode())
    assert read(path) == [Passage("a.txt:0", "", "one"), Passage("a.txt:1", "", ""), Passage("a.txt:2", "", "two é")]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.parquet"])
def test_segments_cut_a_file_without_losing_or_repeating_a_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    texts = [f"{number} {'word ' * (number % 50)}".strip() if number % 7 else "" for number in range(5000)]
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=700)
    else:
        content = "\n".join(texts).encode()
        compress = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
        path.write_bytes(compress(content))
    scanned = scan(source(path))
    assert len(scanned.segments) > 5
    assert scanned.empty_passages == sum(not text for text in texts)
    found = [passage.text for segment in scanned.segments for passage in passages_of(source(path), segment)]
    assert found == [text for text in texts if text]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst"])
def test_segments_in_their_order_decompress_a_file_once(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number} {'word ' * (number % 50)}".strip() for number in range(8_000)]
    path = tmp_path / name
    with fsspec.open(str(path), "wb", compression="infer") as file:
        file.write("\n".join(texts).encode())
    of_file = [(source(path), segment) for segment in scan(source(path)).segments]
    times = []
    decompressed = readers._decompressed
    monkeypatch.setattr(readers, "_decompressed", lambda *file: times.append(1) or decompressed(*file))
    assert [passage.text for passage in passages_in(of_file)] == texts
    assert len(list(passages_in(of_file[::3]))) < len(texts) / 2
    assert len(times) == 2
    backwards = of_file[::-1]
    assert sorted(passage.text for passage in passages_in(backwards)) == sorted(texts)


@pytest.mark.parametrize("is_truncated", [False, True])
def test_decompressing_up_to_a_segment_reports_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_truncated: bool
) -> None:
    path = tmp_path / "a.txt.bz2"
    texts = [f"{number} {'word ' * (number % 50)}".strip() for number in range(8_000)]
    path.write_bytes(bz2.compress("\n".join(texts).encode()))
    last = scan(source(path)).segments[-1]
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


STREAMS = {
    ".gz": (gzip.compress(b"one\n", mtime=0), gzip.compress(b"two\n", mtime=0)),
    ".bz2": (bz2.compress(b"one\n"), bz2.compress(b"two\n")),
    ".xz": (lzma.compress(b"one\n"), lzma.compress(b"two\n")),
    ".zst": (zstd.compress(b"one\n"), zstd.compress(b"two\n")),
}
SKIPPABLE = b"\x50\x2a\x4d\x18\4\0\0\0skip"


@pytest.mark.parametrize(
    ("suffix", "between", "after"),
    [
        *((suffix, b"", b"") for suffix in STREAMS),
        *((suffix, b"\0" * number, b"") for suffix in (".gz", ".bz2") for number in (1, 3, 512)),
        *((suffix, b"", b"\0" * number) for suffix in (".gz", ".bz2") for number in (1, 3, 512, 70_000)),
        *((".xz", b"\0" * number, b"") for number in (4, 8, 512, 70_000)),
        *((".xz", b"", b"\0" * number) for number in (4, 8, 512, 70_000)),
        (".zst", SKIPPABLE, b""),
        (".zst", b"", SKIPPABLE),
        (".gz", gzip.compress(b"", mtime=0), b""),
        (".xz", lzma.compress(b""), b""),
    ],
)
def test_all_streams_of_a_compressed_file_are_read(tmp_path: Path, suffix: str, between: bytes, after: bytes) -> None:
    path = tmp_path / f"a.txt{suffix}"
    first, second = STREAMS[suffix]
    path.write_bytes(first + between + second + after)
    assert [passage.text for passage in read(path)] == ["one", "two"]


def damaged(first: bytes, second: bytes) -> Iterator[bytes]:
    """Yield an intact stream with another that is damaged or cut, or with what is no stream."""
    for start, inserted in ((0, b"?"), (1, b"?"), (0, b"XX"), (2, b"XX")):
        yield first + second[:start] + inserted + second[start + len(inserted) :]
    yield from (first + second[:end] for end in (-1, -4, 10, 4, 1))
    yield first + second + b"garbage!"
    yield from (first + garbage for garbage in (b"X", b"\n", b"\0\0\0\0garbage!"))


@pytest.mark.parametrize("suffix", STREAMS)
def test_what_follows_an_intact_stream_is_read_or_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    for content in damaged(*STREAMS[suffix]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{path} cannot be read to its end \(stream [23], which begins at byte"):
            read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl"])
def test_of_a_damaged_compressed_file_the_checksum_is_blamed_and_not_the_text(tmp_path: Path, name: str) -> None:
    """With level 0, gzip stores the text as it is."""
    stored = bytearray(gzip.compress(b"id\ttext,text\ttitle\n" + b"one\n" * 50_000, compresslevel=0))
    stored[20] = 0xFF
    path = tmp_path / f"{name}.gz"
    path.write_bytes(stored)
    with pytest.raises(InputError, match=r"cannot be read to its end \(stream 1, .*\. If the file is damaged, fetch"):
        read(path)
    path.write_bytes(gzip.compress(b"text\xff\n"))
    with pytest.raises(InputError, match="UTF-8"):
        read(path)


@pytest.mark.parametrize("zeros", [1, 2, 3, 5, 70_001])
@pytest.mark.parametrize("is_last", [False, True])
def test_padding_of_xz_that_is_not_a_multiple_of_four_is_refused(tmp_path: Path, zeros: int, is_last: bool) -> None:
    path = tmp_path / "a.txt.xz"
    first, second = STREAMS[".xz"]
    path.write_bytes(first + b"\0" * zeros + (b"" if is_last else second))
    with pytest.raises(InputError, match=rf"stream 1 is followed by {zeros:,} zeros .* not a multiple of 4"):
        read(path)


@pytest.mark.parametrize("suffix", STREAMS)
def test_a_compressed_file_without_a_stream_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    for content, cause in ((b"", "byte 0 and is empty"), (b"\0\0\0\0", "decompressed")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"stream 1, which begins at byte 0, .*{cause}"):
            read(path)


@pytest.mark.parametrize("suffix", STREAMS)
def test_fsspec_reads_compressed_files_alike_and_still_writes_them(tmp_path: Path, suffix: str) -> None:
    compressed.use_in_fsspec()
    path = tmp_path / f"a.txt{suffix}"
    with fsspec.open(str(path), "wb", compression="infer") as file:
        file.write(b"one\n" * 100_000)
    with fsspec.open(str(path), "rb", compression="infer") as file:
        assert file.read() == b"one\n" * 100_000
        assert file.seek(-3, io.SEEK_END) == 399_997
        assert file.read() == b"ne\n"
        assert file.seek(200_001) == 200_001
        assert file.read(7) == b"ne\none\n"
    path.write_bytes(STREAMS[suffix][0] + b"garbage!")
    with fsspec.open(str(path), "rb", compression="infer") as file, pytest.raises(compressed.DecompressionError):
        file.read()


def test_headers_of_gzip_are_read_wherever_a_block_of_the_file_ends(tmp_path: Path) -> None:
    """They have all optional fields: extra ones, a name, a comment and a checksum."""
    path, block = tmp_path / "a.txt.gz", compressed._BLOCK_BYTES
    header = b"\x1f\x8b\x08\x1e\0\0\0\0\0\xff" + b"\6\0BC\2\0\1\1" + b"a.txt\0" + b"comment\0"
    header += zlib.crc32(header).to_bytes(4, "little")[:2]
    stream = header + gzip.compress(b"two\n", mtime=0)[10:]
    for part in range(len(header) + 1):
        before = io.BytesIO()
        with gzip.GzipFile("x" * (block - part - 25), "wb", fileobj=before, mtime=0) as file:
            file.write(b"one\n")
        first = before.getvalue()
        assert len(first) == block - part
        path.write_bytes(first + stream)
        assert [passage.text for passage in read(path)] == ["one", "two"], part


def test_a_file_of_nothing_but_a_skippable_frame_holds_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(SKIPPABLE)
    assert read(path) == []


def with_long_window(content: bytes) -> bytes:
    """Return a frame with a window of 2 GiB, as of zstd --long=31."""
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 31,
        zstd.CompressionParameter.enable_long_distance_matching: 0,
    }
    compressor = zstd.ZstdCompressor(options=options)
    return compressor.compress(content) + compressor.flush()


def test_a_long_window_is_read_if_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(with_long_window(b"one\ntwo\n"))
    monkeypatch.setattr(compressed, "host_memory_bytes", lambda: 16 << 30)
    assert [passage.text for passage in read(path)] == ["one", "two"]
    monkeypatch.setattr(compressed, "host_memory_bytes", lambda: 2 << 30)
    with pytest.raises(InputError, match=r"too much memory .* may take 1\.1 GB, half .* with a smaller window \(zstd"):
        read(path)


def test_a_dictionary_of_xz_that_is_larger_than_memory_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one\n", preset=6))
    monkeypatch.setattr(compressed, "host_memory_bytes", lambda: 4 << 20)
    with pytest.raises(InputError, match=r"Memory usage limit exceeded: its window or dictionary .* or xz -6"):
        read(path)


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


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"fine\nbad \xff\n", ["a.txt line 2", "byte 9", "0xff", "UTF-8"]),
        ("a.txt", b"one\rtwo\r", ["a.txt has carriage returns", "Convert its line ends to LF"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["a.jsonl line 2", "not JSON"]),
        ("a.jsonl", b'{"body": "x"}\n', ["a.jsonl line 1", '"text"']),
        ("a.jsonl", b'["text"]\n', ["a.jsonl line 1", '"text"']),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["a.jsonl line 1", "surrogate"]),
        ("a.tsv", b"text\tid\n", ["a.tsv", "header", "id\\ttext\\ttitle"]),
        ("a.tsv", b"", ["a.tsv", "header"]),
        ("a.tsv", b"id\ttext\ttitle\n1\ttwo\n", ["a.tsv line 2", "2 fields"]),
        ("a.txt.gz", gzip.compress(b"x" * 100_000, mtime=0)[:-20], ["a.txt.gz", "cannot be read to its end"]),
        ("a.txt.gz", b"no gzip", ["a.txt.gz", "cannot be read to its end"]),
        ("a.txt.bz2", bz2.compress(b"x" * 1000)[:-5], ["a.txt.bz2", "cannot be read to its end"]),
        ("a.txt.xz", lzma.compress(b"x" * 1000)[:-5], ["a.txt.xz", "cannot be read to its end"]),
        ("a.txt.zst", zstd.compress(b"x" * 1000)[:-5], ["a.txt.zst", "cannot be read to its end"]),
        ("a.txt.zst", b"no zstd", ["a.txt.zst", "cannot be read to its end"]),
        ("a.parquet", b"PAR1 and no more", ["a.parquet", "parquet"]),
        ("a.xlsx", b"", ["a.xlsx", ".jsonl"]),
        ("a.csv", b"", ["a.csv begins with ''", "a header that names one column 'text'"]),
        ("a.csv", b"id;text\n1;two\n", ["a.csv begins with 'id;text'", "separated by commas"]),
        ("a.csv", b"id,text,id\n1,one,2\n", ["a.csv begins with 'id,text,id'", "may name one 'id'"]),
        (
            "a.jsonl",
            b'{"id": 1e30, "text": "x", "more": ' + b"[" * 999 + b"]" * 999 + b"}\n",
            ["a.jsonl line 1 is not JSON", "nested too deeply"],
        ),
        ("a.csv", b"text,text\n", ["a.csv begins with 'text,text'", "one column 'text'"]),
        ("a.csv", b"id,text\n1,two, three\n", ["a.csv record 2 has 3 fields", "the header has 2"]),
        ("a.csv", b"id,text\n1\n", ["a.csv record 2 has 1 field", "the header has 2"]),
        ("a.csv", b'text\none\n"two', ["a.csv record 3, which begins at byte 9 ", "unexpected end of data"]),
        ("a.csv", b'text\n"a" b\n', ["a.csv record 2, which begins at byte 5 ", "is doubled"]),
        ("a.csv", b"text\none\rtwo\n", ["a.csv record 2", "carriage return"]),
        (
            "a.csv",
            b"text\rone\rtwo\r",
            ["a.csv record 1", "carriage return", "Convert the line ends of the file to LF"],
        ),
        ("a.csv", b"text\none\0\n", ["a.csv record 2 has a NUL byte", "UTF-16"]),
        ("a.csv", b'text\n"one\ntwo \xff"\n', ["a.csv record 2 is not UTF-8", "byte 14", "0xff"]),
        ("a.csv", "text\none\n".encode("utf-16"), ["a.csv record 1", "UTF-16"]),
        ("a.csv.gz", gzip.compress(b"text\n" * 9, mtime=0)[:-9], ["a.csv.gz", "cannot be read to its end"]),
    ],
)
def test_an_invalid_file_is_refused_with_the_cause(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        scan(source(path))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_overlong_line_is_refused_without_reading_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1_500_000)
    for name, pack in (("a.txt", bytes), ("a.txt.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(b"first line\n" + b"x" * 1_499_999 + b"\n" + b"y" * 1_500_000 + b"\n"))
        found = rows(source(tmp_path / name))
        assert [len(next(found).passage.text), len(next(found).passage.text)] == [10, 1_499_999]
        with pytest.raises(InputError, match=rf"{name} line 3 has more than 1\.5 MB, .* Split it into lines"):
            next(found)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ([("id", ["1"]), ("text", [3])], r"needs one string column named 'text', .* id \(string\), text \(int64\)"),
        ([("text", ["one"]), ("text", ["two"])], r"has the columns text \(string\), text \(string\)"),
        # Without ids, passages of one document could be in two splits.
        ([("text", ["one"]), ("id", ["1"]), ("id", ["2"])], r"a\.parquet has more than one column 'id'"),
    ],
    ids=["no text", "two texts", "two ids"],
)
def test_a_parquet_file_with_other_columns_is_refused(
    tmp_path: Path, columns: list[tuple[str, Any]], said: str
) -> None:
    names, values = zip(*columns, strict=True)
    table = pyarrow.table([pyarrow.array(each) for each in values], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=said):
        scan(source(tmp_path / "a.parquet"))


def test_parquet_files_one_after_another_are_refused(tmp_path: Path) -> None:
    parts = []
    for text in ("first", "second"):
        path = tmp_path / f"{text}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
        assert read(path)
        parts.append(path.read_bytes())
    (tmp_path / "both.parquet").write_bytes(b"".join(parts))
    with pytest.raises(InputError, match="files one after another, of which only the last"):
        read(tmp_path / "both.parquet")


def test_a_parquet_file_that_is_encrypted_is_refused_with_the_remedy(tmp_path: Path) -> None:
    class Keys(encryption.KmsClient):  # type: ignore[misc]  # pyarrow has no types
        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:  # noqa: ARG002
            return b64encode(key_bytes)

    settings = encryption.EncryptionConfiguration(footer_key="key", column_keys={"key": ["text"]})
    keys = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(), settings
    )
    table = pyarrow.table({"text": ["one"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", encryption_properties=keys)
    with pytest.raises(InputError, match=r"\(.*decrypt.*\)\. Write the file again without encryption"):
        read(tmp_path / "a.parquet")


def test_quotes_in_a_field_of_tsv_that_is_not_in_quotes_stay(tmp_path: Path) -> None:
    fields = {
        '"He said" and "she said"': '"He said" and "she said"',
        '"a ""b"" c"': 'a "b" c',
        '"unclosed': '"unclosed',
        '"""': '"""',
        '""""': '"',
        '""': "",
    }
    path = tmp_path / "a.tsv"
    path.write_text("id\ttext\ttitle\n" + "".join(f"1\t{field}\tt\n" for field in fields))
    assert [passage.text for passage in read(path)] == [*fields.values()]


def test_a_parquet_row_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    values = pyarrow.array([b"one", None, b"tw\xff", b"three"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(values), values.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(
        InputError, match=r"a\.parquet, row 2: column 'text' is not UTF-8, .*: byte 2 is 0xff\. Convert"
    ):
        read(tmp_path / "a.parquet")


def test_a_file_that_needs_a_dictionary_is_refused_with_the_remedy(tmp_path: Path) -> None:
    dictionary = zstd.train_dict([b"some words %d" % number * 20 for number in range(300)], 1000)
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(b"some words\n" * 50, zstd_dict=dictionary))
    with pytest.raises(InputError, match=r"needs a dictionary .* Write the file again without a dictionary"):
        read(tmp_path / "a.txt.zst")


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000]}), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"a\.parquet cannot be read as parquet"):
        scan(source(path))


TEXT_TYPES = {
    "string_view": pyarrow.string_view(),
    "large_string": pyarrow.large_string(),
    "dictionary": pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
}


@pytest.mark.parametrize("kind", TEXT_TYPES.values(), ids=TEXT_TYPES)
def test_every_type_of_text_in_parquet_is_read(tmp_path: Path, kind: pyarrow.DataType) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array(["one", "two", None, "one"]).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"id": column, "text": column}), path, row_group_size=2)
    assert read(path) == [
        Passage("one", "", "one"),
        Passage("two", "", "two"),
        Passage("a.parquet:2", "", ""),
        Passage("one", "", "one"),
    ]


def test_a_page_of_parquet_that_differs_from_its_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"passage {row}" for row in range(900)]})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, path, row_group_size=300, **options)
    content = path.read_bytes()
    assert len(read(path)) == 900
    path.write_bytes(content.replace(b"passage 500", b"passafe 500"))
    with pytest.raises(InputError, match=r"a\.parquet cannot be read as parquet from row \d+ on \(.*CRC .* page"):
        read(path)


def test_a_text_of_parquet_that_is_too_long_for_one_passage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 1000, "a" * 1001]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet, row 1: the text has more than .* Choose a text in smaller rows"):
        read(tmp_path / "a.parquet")


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


def test_a_csv_file_as_spreadsheets_write_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    huge = "word " * 100_000
    path.write_bytes(f'\ufefftext,author\r\n"one, ""two""\r\n\nthree",a\r\n\r\n,b\r\n{huge},c'.encode())
    assert [(row.number, row.passage) for row in rows(source(path))] == [
        (1, Passage("a.csv:1", "", 'one, "two"\r\n\nthree')),
        (2, Passage("a.csv:2", "", "")),
        (3, Passage("a.csv:3", "", "")),
        (4, Passage("a.csv:4", "", huge)),
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.xz"])
def test_segments_of_csv_begin_at_records_and_not_at_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    texts = [f"{number},\n" + '"word"\n' * (number % 50) for number in range(3000)]
    content = "\n".join(["title,text", *(f"a,{quoted(text)}" for text in texts)]).encode()
    compress: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    path.write_bytes(compress.get(path.suffix, bytes)(content))
    scanned = scan(source(path))
    assert len(scanned.segments) > 5
    of_file = [(source(path), segment) for segment in scanned.segments]
    assert [passage.text for passage in passages_in(of_file)] == texts
    assert [*passages_of(*of_file[-1])][-1].text == texts[-1]


def test_an_overlong_record_of_csv_is_refused_without_reading_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 200_000)
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\nfirst\n"never closed\n' + b"a line\n" * 100_000)
    found = rows(source(path))
    assert next(found).passage.text == "first"
    with pytest.raises(InputError, match=r"a\.csv record 3 has more than 0\.2 MB, but a record is one passage"):
        next(found)
