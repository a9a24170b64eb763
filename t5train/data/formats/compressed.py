"""Decompresses .gz, .bz2, .xz and .zst files to their last byte, or raises an error that says where they are damaged.

Damage is found by the checksums that a file has, after the content that they are of. .zst may have none (``zstd`` adds
one, some libraries do not): content that is altered, but still can be decompressed, is not found then.

The standard library's readers of .bz2 and .xz end at the first stream that they do not recognise, and so lose the rest
of a file without an error. fsspec uses them: ``use_in_fsspec`` replaces them.
"""

import bz2
import io
import lzma
from collections.abc import Callable, Sequence
from functools import cache
from typing import IO, Any, NamedTuple, cast

from backports import zstd
from isal import igzip_lib
from isal.isal_zlib import IsalError

from t5train.host_resources import host_memory_bytes
from t5train.quantities import format_bytes

_BLOCK_BYTES = 64 << 10
_WINDOW_LOGS = (27, 31)
"""zstd reads windows of 2**27 bytes (128 MiB) without asking, and has none of more than 2**31."""
_FAILURES = (
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    lzma.LZMAError,
    zstd.ZstdError,
    cast(type[Exception], IsalError),
)
"""What decompressors raise. isal's stub declares its error as an instance."""
_AGAIN = "If the file is damaged, fetch or write it again"
_GZIP_HEADER_BYTES, _MOST_HEADER_BYTES = 10, 1 << 20
"""A header of gzip has names and comments of any length. One of more than the second is no gzip."""


class DecompressionError(Exception):
    """A file is damaged, incomplete or needs too much memory. The message says where, and ``remedy`` what to do."""

    def __init__(self, message: str, remedy: str = _AGAIN) -> None:
        super().__init__(message)
        self.remedy = remedy


class _Compression(NamedTuple):
    """How the streams of a compressed file follow each other."""

    name: str
    """fsspec's name of it."""
    decompressor: Callable[[], Any]
    """Makes a decompressor for one stream."""
    padding: int
    """Zeros may follow a stream, as many as a multiple of this; 0 if there may be none."""
    archives: Sequence[str]
    """Short ends of names of .tar archives that are compressed so."""
    has_header: Callable[[bytes], bool] = lambda _: True
    """Whether the decompressor may get the beginning of a stream before it gets more."""


def memory_limit_bytes() -> int:
    """Return how much memory a decompressor may take: half of this machine's, because the text needs some, too."""
    return host_memory_bytes() // 2


def _zstd() -> Any:
    least, most = _WINDOW_LOGS
    window_log = max(least, min(most, memory_limit_bytes().bit_length() - 1))
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})


def _has_gzip_header(start: bytes) -> bool:
    """Whether the header of a .gz stream is complete: isal takes many for damaged if it gets them in two pieces."""
    if len(start) < _GZIP_HEADER_BYTES or len(start) >= _MOST_HEADER_BYTES:
        return len(start) >= _MOST_HEADER_BYTES
    flags, end = start[3], _GZIP_HEADER_BYTES
    if flags & 4:  # extra fields, after their size
        end += 2 + int.from_bytes(start[end : end + 2], "little")
    for flag in (8, 16):  # a name and a comment, each with a zero at its end
        if flags & flag and not (end := start.find(b"\0", end) + 1):
            return False
    return len(start) >= end + (2 if flags & 2 else 0)  # a checksum


COMPRESSIONS = {
    ".gz": _Compression(
        "gzip", lambda: igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP), 1, ["tgz"], _has_gzip_header
    ),
    ".bz2": _Compression("bz2", bz2.BZ2Decompressor, 1, ["tbz2", "tbz"]),
    ".xz": _Compression("xz", lambda: lzma.LZMADecompressor(memlimit=memory_limit_bytes()), 4, ["txz"]),
    ".zst": _Compression("zstd", _zstd, 0, ["tzst"]),
}
"""By the end of a file's name. .zip is not one of them: it is an archive of any number of files."""


class Decompressed(io.BufferedReader):
    """The content of a compressed file. Raises DecompressionError unless all of it can be read."""

    def __init__(self, stored: IO[bytes], suffix: str) -> None:
        """``stored`` is the compressed file, which is left open; ``suffix`` is a key of ``COMPRESSIONS``."""
        super().__init__(_Streams(stored, COMPRESSIONS[suffix]), _BLOCK_BYTES)


@cache
def use_in_fsspec() -> None:
    """Let fsspec, and so ``datasets``, decompress files in this process as this module does."""
    from fsspec.compression import compr, register_compression  # slow to import, for workers that read local files

    for suffix, compression in COMPRESSIONS.items():
        opener = _opener(suffix, compr[compression.name])
        register_compression(compression.name, opener, [suffix.removeprefix("."), *compression.archives], force=True)


def _opener(suffix: str, compressed: Callable[..., IO[bytes]]) -> Callable[..., IO[bytes]]:
    def opened(stored: IO[bytes], mode: str = "rb", **options: Any) -> IO[bytes]:
        return Decompressed(stored, suffix) if "r" in mode else compressed(stored, mode=mode, **options)

    return opened


class _Streams(io.RawIOBase):
    """The contents of all streams of a compressed file, one after the other."""

    def __init__(self, stored: IO[bytes], compression: _Compression) -> None:
        self._stored, self._compression = stored, compression
        self._rewind()

    def _rewind(self) -> None:
        self._decompressor = self._compression.decompressor()
        self._input, self._stored_bytes = b"", 0
        """What the decompressor has not got yet, and how much has been read in all."""
        self._number, self._begins_at, self._has_header = 1, 0, False
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True, although all before a position has to be decompressed."""
        return True

    def tell(self) -> int:
        """Return the position in the content."""
        return self._position

    def seek(self, offset: int, relative_to: int = io.SEEK_SET, /) -> int:
        """Read up to a position, or to the end if that comes first, and return the new position."""
        if relative_to == io.SEEK_END:
            self._skip_to(None)
        target = offset + (0 if relative_to == io.SEEK_SET else self._position)
        if target < self._position:
            self._stored.seek(0)
            self._rewind()
        self._skip_to(target)
        return self._position

    def _skip_to(self, target: int | None) -> None:
        skipped = memoryview(bytearray(_BLOCK_BYTES))
        while target is None or self._position < target:
            rest = _BLOCK_BYTES if target is None else min(_BLOCK_BYTES, target - self._position)
            if not self.readinto(skipped[:rest]):
                break

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into ``buffer``, and return their number; 0 at the end of the last stream."""
        while True:
            if self._decompressor.eof and not self._begin_stream():
                return 0
            while not self._has_header:
                self._has_header = self._compression.has_header(self._input) or not self._read()
            if not self._input and self._decompressor.needs_input and not self._read():
                is_empty = " and is empty" if not self._stored_bytes else ""
                raise self._error(f"the file ends at byte {self._stored_bytes:,}{is_empty}")
            try:
                content = self._decompressor.decompress(self._input, len(buffer))
            except _FAILURES as error:
                raise self._failed(error) from error
            self._input = self._decompressor.unused_data if self._decompressor.eof else b""
            if content:
                buffer[: len(content)] = content
                self._position += len(content)
                return len(content)

    def _read(self) -> bool:
        """Read more of the compressed file. Returns False at its end."""
        more = self._stored.read(_BLOCK_BYTES)
        self._input, self._stored_bytes = self._input + more, self._stored_bytes + len(more)
        return bool(more)

    def _begin_stream(self) -> bool:
        """Prepare to read the next stream. Returns False if there is none."""
        zeros = 0
        while self._input or self._read():
            following = self._input.lstrip(b"\0") if self._compression.padding else self._input
            zeros += len(self._input) - len(following)
            self._input = following
            if following:
                break
        if zeros % (self._compression.padding or 1):
            raise DecompressionError(
                f"stream {self._number} is followed by {zeros:,} zeros before byte "
                f"{self._stored_bytes - len(self._input):,}, which are not a multiple of {self._compression.padding}"
            )
        if not self._input:
            return False
        self._number, self._begins_at = self._number + 1, self._stored_bytes - len(self._input)
        self._has_header = False
        self._decompressor = self._compression.decompressor()
        return True

    def _failed(self, error: Exception) -> DecompressionError:
        said = str(error) or type(error).__name__
        if "Dictionary mismatch" in said:
            return self._error(
                f"{said}: it needs a dictionary that is in another file",
                "Write the file again without a dictionary (zstd without -D). A damaged file may fail in the same way",
            )
        if not isinstance(error, MemoryError) and "memory" not in said.lower():
            return self._error(said)
        return self._error(
            f"{said}: its window or dictionary may take {format_bytes(memory_limit_bytes())}, half of this machine's "
            "memory",
            "Use a machine with more memory, or write the file again with a smaller window (zstd without --long, or "
            "xz -6). A damaged file may fail in the same way",
        )

    def _error(self, said: str, remedy: str = _AGAIN) -> DecompressionError:
        stream = f"stream {self._number}, which begins at byte {self._begins_at:,}"
        return DecompressionError(f"{stream}, cannot be decompressed: {said}", remedy)
