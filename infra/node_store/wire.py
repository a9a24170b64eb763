"""How bytes of files are asked for and sent, over a pipe of ssh or a connection between nodes.

Messages are lines of JSON. Who wants bytes says ``{"name", "offset", "size"}``: bytes ``offset`` to ``size`` of that
file. The answer is any number of ``{"bytes": n}``, each followed by n bytes, then ``{"end": true}``; or ``{"error":
text}`` at any point, after which the file can be asked for again; with ``"unreadable": true`` when that file may be
whole, and cannot be read now.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from infra.node_store.paths import within
from t5train.errors import StorageError, T5TrainError, Unreadable
from t5train.presence import reading

CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20  # of a message; far above any, and below what memory takes

Message = dict[str, Any]
Source = Callable[[str, int, int], Iterator[bytes]]
"""Yields bytes ``offset`` to ``size`` of the file of a name. Raises OSError or StorageError."""


class BrokenOff(ConnectionError):
    """The other side ended in the midst of a conversation."""


class Refused(StorageError):
    """The other side cannot send what was asked of it."""


class CannotRead(Refused):
    """The other side has what was asked of it, and cannot read it now."""


class Channel:
    """Messages and bytes in both directions. Several threads may ``say``; one may read."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._writing = threading.Lock()

    def close(self) -> None:
        """End the conversation."""
        with suppress(OSError), self._reader, self._writer:  # what was not sent is lost
            return

    def say(self, message: Message, content: bytes = b"") -> None:
        """Send a message and what follows it."""
        with self._writing:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.write(content)
            self._writer.flush()

    def hear(self, most_bytes: int = _MOST_LINE_BYTES) -> Message | None:
        """The next message; None once the other side has ended, or where no message ends within that many bytes."""
        line = self._reader.readline(most_bytes)
        if not line.endswith(b"\n"):
            return None
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise BrokenOff(f"the other side said {line[:80]!r}, which is no message")
        return message

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; BrokenOff if there are fewer."""
        content = self._reader.read(count)
        if len(content) < count:
            raise BrokenOff(f"{len(content)} of {count} bytes came")
        return content

    def fetch(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """Ask for bytes of a file, as ``Source`` has it. Raises Refused, or BrokenOff."""
        self.say({"name": name, "offset": offset, "size": size})
        left = size - offset
        while (message := self.hear()) is not None:
            if "error" in message:
                raise (CannotRead if message.get("unreadable") else Refused)(str(message["error"]))
            if "end" in message:
                return
            count = message.get("bytes")
            if not isinstance(count, int) or not 0 <= count <= min(CHUNK_BYTES, left):
                raise BrokenOff(f"the other side would send {count} bytes of {name}, of which {left} were asked for")
            left -= count
            yield self.take(count)
        raise BrokenOff(f"the other side ended while it sent {name}")

    def answer(self, request: Message, source: Source) -> None:
        """Send what was asked for."""
        try:
            for chunk in source(str(request["name"]), int(request["offset"]), int(request["size"])):
                self.say({"bytes": len(chunk)}, chunk)
        except (T5TrainError, OSError) as error:
            if isinstance(error, ConnectionError):
                raise
            self.say({"error": str(error), "unreadable": isinstance(error, Unreadable)})
        else:
            self.say({"end": True})


def files_in(folder: Path) -> Source:
    """The files of a folder, as they are."""

    def read(name: str, offset: int, size: int) -> Iterator[bytes]:
        path = within(folder, name)
        with ExitStack() as stack:  # what reads the chunks may fail too: that is not an error of this file
            with reading(path):
                file = stack.enter_context(open(path, "rb"))
                file.seek(offset)
            while offset < size:
                with reading(path):
                    chunk = file.read(min(CHUNK_BYTES, size - offset))
                if not chunk:
                    raise StorageError(f"{folder / name} ends after {offset} of {size} bytes: it was cut short")
                offset += len(chunk)
                yield chunk

    return read
