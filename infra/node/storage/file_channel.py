"""How bytes of files are asked for and sent, over a pipe of ssh or a connection between nodes.

Messages are lines of JSON. A request is ``{"name", "offset", "size"}``: bytes ``offset`` to ``size`` of that file. The
answer is any number of ``{"bytes": n}``, each followed by n bytes, then ``{"end": true}``; or, at any point,
``{"error": text}``, after which the file can be asked for again; with ``"unreadable": true`` if that file may be whole
and cannot be read now. Standard library only, as nodes import it.
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


@dataclass(frozen=True)
class Wanted:
    """A file by its name within a folder, its size in bytes and its sha256.

    ``as_good`` are sizes and digests of other bytes that say the same: what is there as one of them is left.
    """

    name: str
    size: int
    sha256: str
    as_good: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, name: str, digest: "FileDigest") -> Self:
        """What a record says of a file."""
        return cls(name, digest.size, digest.sha256)

    def to_json(self) -> dict[str, Any]:
        """Such that ``Wanted(**...)`` is the same."""
        return asdict(self)


class Watcher:
    """Told how far files have come; to be overridden."""

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:
        """``size`` bytes of it are in ``path`` by now, to which more will be added."""

    def grown(self, wanted: Wanted, count: int) -> None:
        """``count`` more are."""

    def whole(self, wanted: Wanted) -> None:
        """It is in place, and verified."""


_TELL_SECONDS = 0.5


def node_channel() -> Channel:
    """What follows the first line of stdin, which was read unbuffered."""
    reader = open(0, "rb", buffering=CHUNK_BYTES, closefd=False)  # noqa: SIM115 - for as long as the process lives
    return Channel(reader, open(1, "wb", closefd=False))


class ProgressRelay(Watcher):
    """Tells the head how many more bytes are here, now and then."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._untold, self._told_at = 0, time.monotonic()
        self._come: dict[str, int] = {}

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:  # noqa: ARG002 - as Watcher has it
        """What is there counts."""
        self._come[wanted.name] = 0
        self.grown(wanted, size)

    def grown(self, wanted: Wanted, count: int) -> None:
        """More is."""
        self._come[wanted.name] += count
        self._add(count)

    def whole(self, wanted: Wanted) -> None:
        """What was there already counts, too."""
        self._add(wanted.size - self._come.get(wanted.name, 0))

    def _add(self, count: int) -> None:
        self._untold += count
        if time.monotonic() - self._told_at > _TELL_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._channel.say({"come": self._untold})
        self._untold, self._told_at = 0, time.monotonic()
