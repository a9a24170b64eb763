"""The protocol that requests and sends bytes of files, over an ssh pipe or a connection between nodes.

Messages are lines of JSON. A request is ``{"name", "offset", "size"}``: bytes ``offset`` to ``size`` of that file. The
answer is any number of ``{"bytes": n}``, each followed by n bytes, then ``{"end": true}``; or, at any point,
``{"error": text}``, after which the file can be requested again. An error has ``"unreadable": true`` if the file may be
intact but cannot be read now. Standard library only, as nodes import it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from infra.node.node_folders import within
from t5train.errors import StorageError, T5TrainError, Unreadable
from t5train.files.presence import reading

if TYPE_CHECKING:
    from t5train.records.digests import FileDigest


CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20  # of a message: far more than any needs, and few enough for memory
Message = dict[str, Any]
Source = Callable[[str, int, int], Iterator[bytes]]
"""Yields bytes ``offset`` to ``size`` of the file of a name. Raises OSError or StorageError."""


class BrokenOff(ConnectionError):
    """The peer closed the connection, or broke the protocol, in the middle of a conversation."""


class Refused(StorageError):
    """The peer cannot send what was requested."""


class CannotRead(Refused):
    """The peer has what was requested, but cannot read it now."""


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
        """Send a message, followed by ``content``."""
        with self._writing:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.write(content)
            self._writer.flush()

    def hear(self, most_bytes: int = _MOST_LINE_BYTES) -> Message | None:
        """The next message; None if the peer has closed the connection, or no message ends within ``most_bytes``."""
        line = self._reader.readline(most_bytes)
        if not line.endswith(b"\n"):
            return None
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise BrokenOff(f"the peer sent {line[:80]!r}, which is not a JSON object")
        return message

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; BrokenOff if there are fewer."""
        content = self._reader.read(count)
        if len(content) < count:
            raise BrokenOff(f"the peer sent only {len(content)} of {count} bytes")
        return content

    def fetch(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """Request bytes of a file, as in ``Source``. Raises Refused or BrokenOff."""
        self.say({"name": name, "offset": offset, "size": size})
        left = size - offset
        while (message := self.hear()) is not None:
            if "error" in message:
                raise (CannotRead if message.get("unreadable") else Refused)(str(message["error"]))
            if "end" in message:
                return
            count = message.get("bytes")
            if not isinstance(count, int) or not 0 <= count <= min(CHUNK_BYTES, left):
                raise BrokenOff(f"the peer announced {count} bytes of {name}, but {left} were requested")
            left -= count
            yield self.take(count)
        raise BrokenOff(f"the peer closed the connection while sending {name}")

    def answer(self, request: Message, source: Source) -> None:
        """Send what was requested."""
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
    """A source that reads the files of a folder."""

    def read(name: str, offset: int, size: int) -> Iterator[bytes]:
        path = within(folder, name)
        with ExitStack() as stack:  # the code that takes the chunks may fail too: that is not an error of this file
            with reading(path):
                file = stack.enter_context(open(path, "rb"))
                file.seek(offset)
            while offset < size:
                with reading(path):
                    chunk = file.read(min(CHUNK_BYTES, size - offset))
                if not chunk:
                    raise StorageError(f"{folder / name} ends after {offset} of {size} bytes: it was truncated")
                offset += len(chunk)
                yield chunk

    return read


@dataclass(frozen=True)
class Wanted:
    """A file by its name within a folder, its size in bytes and its sha256.

    ``as_good`` are sizes and digests of equivalent contents: an existing file that matches one of them is kept.
    """

    name: str
    size: int
    sha256: str
    as_good: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, name: str, digest: "FileDigest") -> Self:
        """The file that a record describes."""
        return cls(name, digest.size, digest.sha256)

    def to_json(self) -> dict[str, Any]:
        """Fields from which ``Wanted(**...)`` makes it again."""
        return asdict(self)


class Watcher:
    """Is notified of the progress of files. Override its methods."""

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:
        """``path`` has ``size`` bytes of the file; more will be added."""

    def grown(self, wanted: Wanted, count: int) -> None:
        """``count`` more bytes were added."""

    def whole(self, wanted: Wanted) -> None:
        """The file is verified and at its final path."""


_TELL_SECONDS = 0.5


def node_channel() -> Channel:
    """A channel over stdin, whose first line was already read unbuffered, and stdout."""
    reader = open(0, "rb", buffering=CHUNK_BYTES, closefd=False)  # noqa: SIM115 - open as long as the process runs
    return Channel(reader, open(1, "wb", closefd=False))


class ProgressRelay(Watcher):
    """Reports to the head now and then how many more bytes have arrived."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._untold, self._told_at = 0, time.monotonic()
        self._come: dict[str, int] = {}

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:  # noqa: ARG002 - the signature of Watcher
        """Count the bytes that are already there."""
        self._come[wanted.name] = 0
        self.grown(wanted, size)

    def grown(self, wanted: Wanted, count: int) -> None:
        """Count the bytes that arrived."""
        self._come[wanted.name] += count
        self._add(count)

    def whole(self, wanted: Wanted) -> None:
        """Count the bytes that did not have to be sent."""
        self._add(wanted.size - self._come.get(wanted.name, 0))

    def _add(self, count: int) -> None:
        self._untold += count
        if time.monotonic() - self._told_at > _TELL_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._channel.say({"come": self._untold})
        self._untold, self._told_at = 0, time.monotonic()
