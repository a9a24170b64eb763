"""Passages in frames of Zstandard: what is stored of a text that can be read from its beginning only."""

from collections.abc import Iterator
from typing import IO

import orjson
from backports import zstd

from t5train.data.passages import Passage, Row, SourceFile

FRAMES = ".passages.zst"
"""The end of the names of files of ``PassageFrames``."""
_FRAME_LEVEL = 1
_BLOCK_BYTES = 128 << 10


def is_framed(source: SourceFile) -> bool:
    """Whether a file was written by ``PassageFrames``, so that each of its segments can be read alone."""
    return source.path.name.endswith(FRAMES)


class PassageFrames:
    """Writes passages as JSON lines [id, title, text] in frames of Zstandard, of which each can be read alone.

    Decompressing them takes less time than decompressing a .gz file. They take up to about twice its space.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._lines = file, list[bytes]()
        self.offset = 0
        """Where the next frame begins in the file."""

    def add(self, passage: Passage) -> bytes:
        """Add a passage to the frame. Returns its line."""
        line = orjson.dumps([*passage]) + b"\n"
        self._lines.append(line)
        return line

    def end_frame(self) -> None:
        """Write the frame, and begin the next."""
        frame = zstd.compress(b"".join(self._lines), level=_FRAME_LEVEL)
        self._file.write(frame)
        self.offset += len(frame)
        self._lines.clear()


def frame_rows(source: SourceFile, number: int, offset: int, _: object) -> Iterator[Row]:
    """Yield the rows of frames. Their offset is where their frame begins in the file as stored."""
    with open(source.path, "rb") as stored:
        for start, content in _contents(stored, offset):
            for line in content.splitlines():
                yield Row(number, start, Passage(*orjson.loads(line)))
                number += 1


def _contents(stored: IO[bytes], offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the content of each frame, from the one that begins at ``offset``."""
    stored.seek(offset)
    block = b""
    while block := block or stored.read(_BLOCK_BYTES):
        frame, content = zstd.ZstdDecompressor(), list[bytes]()
        content.append(frame.decompress(block))
        while not frame.eof:
            if not (block := stored.read(_BLOCK_BYTES)):
                raise EOFError("its last frame is incomplete")
            content.append(frame.decompress(block))
        block = frame.unused_data
        yield offset, b"".join(content)
        offset = stored.tell() - len(block)
