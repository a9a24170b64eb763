"""Compressed files: all their streams are read, or the file is refused with the cause."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from backports import zstd

from t5train.data.formats import compressed
from t5train.data.passages import Passage, SourceFile
from t5train.data.readers import rows
from t5train.errors import InputError

pytestmark = pytest.mark.usefixtures("quick_workers")


def source(path: Path, content: bytes | None = None) -> SourceFile:
    if content is not None:
        path.write_bytes(content)
    return SourceFile(path, path.name)


def read(path: Path, content: bytes | None = None) -> list[Passage]:
    return [row.passage for row in rows(source(path, content))]


def texts_in(path: Path, content: bytes) -> list[str]:
    return [passage.text for passage in read(path, content)]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}
STREAMS = {suffix: (pack(b"one\n"), pack(b"two\n")) for suffix, pack in PACKED.items()}
SKIPPABLE = b"\x50\x2a\x4d\x18\4\0\0\0skip"


@pytest.mark.parametrize(
    ("suffix", "between", "after"),
    [
        *((suffix, b"", b"") for suffix in STREAMS),
        *((suffix, b"\0" * number, b"") for suffix in (".gz", ".bz2") for number in (1, 512)),
        *((suffix, b"", b"\0" * number) for suffix in (".gz", ".bz2") for number in (1, 70_000)),
        *((".xz", b"\0" * number, b"") for number in (4, 70_000)),
        *((".xz", b"", b"\0" * number) for number in (4, 70_000)),
        (".zst", SKIPPABLE, b""),
        (".zst", b"", SKIPPABLE),
        (".gz", gzip.compress(b"", mtime=0), b""),
        (".xz", lzma.compress(b""), b""),
    ],
)
def test_all_streams_of_a_compressed_file_are_read(tmp_path: Path, suffix: str, between: bytes, after: bytes) -> None:
    first, second = STREAMS[suffix]
    assert texts_in(tmp_path / f"a.txt{suffix}", first + between + second + after) == ["one", "two"]


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
        with pytest.raises(InputError, match=rf"{path} cannot be read to its end \(stream [23], which begins at byte"):
            read(path, content)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl"])
def test_of_a_damaged_compressed_file_the_checksum_is_blamed_and_not_the_text(tmp_path: Path, name: str) -> None:
    """With level 0, gzip stores the text as it is."""
    stored = bytearray(gzip.compress(b"id\ttext,text\ttitle\n" + b"one\n" * 50_000, compresslevel=0))
    stored[20] = 0xFF
    with pytest.raises(InputError, match=r"cannot be read to its end \(stream 1, .*\. If the file is damaged, fetch"):
        read(tmp_path / f"{name}.gz", stored)
    with pytest.raises(InputError, match="UTF-8"):
        read(tmp_path / f"{name}.gz", gzip.compress(b"text\xff\n"))


@pytest.mark.parametrize("zeros", [1, 3, 70_001])
@pytest.mark.parametrize("is_last", [False, True])
def test_padding_of_xz_that_is_not_a_multiple_of_four_is_refused(tmp_path: Path, zeros: int, is_last: bool) -> None:
    first, second = STREAMS[".xz"]
    with pytest.raises(InputError, match=rf"stream 1 is followed by {zeros:,} zeros .* not a multiple of 4"):
        read(tmp_path / "a.txt.xz", first + b"\0" * zeros + (b"" if is_last else second))


@pytest.mark.parametrize("suffix", STREAMS)
def test_a_compressed_file_without_a_stream_is_refused(tmp_path: Path, suffix: str) -> None:
    for content, cause in ((b"", "byte 0 and is empty"), (b"\0\0\0\0", "decompressed")):
        with pytest.raises(InputError, match=rf"stream 1, which begins at byte 0, .*{cause}"):
            read(tmp_path / f"a.txt{suffix}", content)


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


def test_a_window_or_dictionary_is_read_if_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is one of 2 GiB, as of zstd --long=31."""
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 31,
        zstd.CompressionParameter.enable_long_distance_matching: 0,
    }
    compressor = zstd.ZstdCompressor(options=options)
    content = compressor.compress(b"one\ntwo\n") + compressor.flush()
    monkeypatch.setattr(compressed, "host_memory_bytes", lambda: 16 << 30)
    assert texts_in(tmp_path / "a.txt.zst", content) == ["one", "two"]
    monkeypatch.setattr(compressed, "host_memory_bytes", lambda: 2 << 30)
    with pytest.raises(InputError, match=r"too much memory .* may take 1\.1 GB, half .* with a smaller window \(zstd"):
        read(tmp_path / "a.txt.zst")
    monkeypatch.setattr(compressed, "host_memory_bytes", lambda: 4 << 20)
    with pytest.raises(InputError, match=r"Memory usage limit exceeded: its window or dictionary .* or xz -6"):
        read(tmp_path / "a.txt.xz", lzma.compress(b"one\n", preset=6))


def test_a_file_that_needs_a_dictionary_is_refused_with_the_remedy(tmp_path: Path) -> None:
    dictionary = zstd.train_dict([b"some words %d" % number * 20 for number in range(300)], 1000)
    content = zstd.compress(b"some words\n" * 50, zstd_dict=dictionary)
    with pytest.raises(InputError, match=r"needs a dictionary .* Write the file again without a dictionary"):
        read(tmp_path / "a.txt.zst", content)
