"""The protocol that requests and sends bytes of files, over an ssh pipe or a connection between nodes.

A ``FileRange`` requests bytes of a file. The answer is any number of ``Chunk``, each followed by its bytes, then
``EndOfRange``; or, at any point, ``NotSent``, after which the file can be requested again. Standard library only, as
nodes import it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from infra.node.channel import CHUNK_BYTES, BrokenOff, Channel
from infra.node.node_folders import within
from t5train.errors import StorageError, T5TrainError, Unreadable
from t5train.files.presence import reading

if TYPE_CHECKING:
    from t5train.records.digests import FileDigest


class FromReceiver:
    """Base class of the messages from the side that receives files."""


class FromSender:
    """Base class of the answers to a FileRange, from the side that sends files."""


@dataclass(frozen=True)
class FileRange(FromReceiver):
    """Requests the bytes from ``offset`` up to ``size`` of the file called ``name``."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Chunk(FromSender):
    """Announces the next ``count`` bytes of the file, which follow this message."""

    count: int


@dataclass(frozen=True)
class EndOfRange(FromSender):
    """All bytes have been sent."""


@dataclass(frozen=True)
class NotSent(FromSender):
    """The rest cannot be sent."""

    reason: str
    may_be_intact: bool
    """Whether the file may be intact, but cannot be read now."""


@dataclass(frozen=True)
class BytesArrived(FromReceiver):
    """Reports to the head how many more bytes have been copied to a node, and how many did not have to be."""

    copied: int
    already_there: int


@dataclass(frozen=True)
class AllArrived(FromReceiver):
    """Reports to the head that a node has all files."""


Source = Callable[[str, int, int], Iterator[bytes]]
"""Called with ``name``, ``offset`` and ``size``, yields the bytes of a FileRange. Raises OSError or StorageError."""


class Refused(StorageError):
    """The peer cannot send what was requested."""


class CannotRead(Refused):
    """The peer has what was requested, but cannot read it now."""


def fetch_over(peer: Channel) -> Source:
    """A source that requests the bytes from a peer. It raises Refused if the peer cannot send them, or BrokenOff."""

    def fetch(name: str, offset: int, size: int) -> Iterator[bytes]:
        peer.send(FileRange(name, offset, size))
        left = size - offset
        while (message := peer.receive(FromSender)) is not None:
            match message:
                case Chunk(count):
                    if not 0 <= count <= min(CHUNK_BYTES, left):
                        raise BrokenOff(f"the peer announced {count} bytes of {name}, but {left} were requested")
                    left -= count
                    yield peer.read(count)
                case NotSent(reason, may_be_intact):
                    raise (CannotRead if may_be_intact else Refused)(reason)
                case EndOfRange():
                    return
        raise BrokenOff(f"the peer closed the connection while sending {name}")

    return fetch


def answer(peer: Channel, request: FileRange, source: Source) -> None:
    """Send the bytes that the peer has requested, or why they cannot be sent."""
    try:
        for chunk in source(request.name, request.offset, request.size):
            peer.send(Chunk(len(chunk)), chunk)
    except (T5TrainError, OSError) as error:
        if isinstance(error, ConnectionError):
            raise
        peer.send(NotSent(str(error), may_be_intact=isinstance(error, Unreadable)))
    else:
        peer.send(EndOfRange())


def files_in(folder: Path) -> Source:
    """A source that reads the files of a folder."""

    def read(name: str, offset: int, size: int) -> Iterator[bytes]:
        path = within(folder, name)
        with ExitStack() as stack:  # errors of the code that takes the chunks must not be blamed on this file
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


class Content(NamedTuple):
    """Size in bytes and sha256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Wanted:
    """A file that is wanted: its name within a folder, its size in bytes and its sha256.

    ``as_good`` are equivalent contents: an existing file that matches one of them is kept.
    """

    name: str
    size: int
    sha256: str
    as_good: tuple[Content, ...] = ()

    @classmethod
    def of(cls, name: str, digest: "FileDigest") -> Self:
        """The file that a record describes."""
        return cls(name, digest.size, digest.sha256)


class Watcher:
    """Is notified of the progress of a transfer. Override its methods."""

    def begun(self, wanted: Wanted, size: int) -> None:
        """The partial file has the first ``size`` bytes; more will be added."""

    def grown(self, wanted: Wanted, count: int) -> None:
        """``count`` more bytes were added."""

    def whole(self, wanted: Wanted) -> None:
        """The file is verified and at its final path."""


_REPORT_SECONDS = 0.5


class ProgressRelay(Watcher):
    """Reports to the head, about twice a second at most, how many more bytes have arrived. ``end`` reports the rest."""

    def __init__(self, head: Channel) -> None:
        self._head = head
        self._copied = self._already_there = 0
        self._reported_at = time.monotonic()
        self._begun = set[str]()

    def begun(self, wanted: Wanted, size: int) -> None:
        """Count the bytes of a partial file that are already there; none if it is begun again, as it was damaged."""
        is_first = wanted.name not in self._begun
        self._begun.add(wanted.name)
        self._add(already_there=size if is_first else 0)

    def grown(self, wanted: Wanted, count: int) -> None:
        """Count the bytes that arrived."""
        self._begun.add(wanted.name)
        self._add(copied=count)

    def whole(self, wanted: Wanted) -> None:
        """Count the bytes of a file that did not have to be sent."""
        if wanted.name not in self._begun:
            self._add(already_there=wanted.size)

    def end(self) -> None:
        """Report what has not been reported yet."""
        self._head.send(BytesArrived(self._copied, self._already_there))
        self._copied = self._already_there = 0
        self._reported_at = time.monotonic()

    def _add(self, copied: int = 0, already_there: int = 0) -> None:
        self._copied += copied
        self._already_there += already_there
        if time.monotonic() - self._reported_at > _REPORT_SECONDS:
            self.end()
