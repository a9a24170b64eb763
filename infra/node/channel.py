"""A connection to another machine, which carries messages in both directions, and bytes of files between messages.

Standard library only, as nodes import it.
"""

import io
import select
import threading
import time
from contextlib import suppress
from typing import TypeVar

from infra.node.messages import decode, encode
from t5train.errors import BadMessage

CHUNK_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20  # the longest message: far more than any needs, but still fits in memory
_READ_BYTES = 1 << 18
T = TypeVar("T")


class BrokenOff(ConnectionError):
    """The peer closed the connection, or broke the protocol, in the middle of a conversation."""


class WrongMessage(BrokenOff):
    """The peer sent something other than a message that is expected at this point."""

    def __init__(self, reason: BadMessage) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Channel:
    """A connection to a peer. Several threads may send; only one may receive.

    Everything is read through one buffer, so that bytes, messages and time limits can be mixed.
    """

    def __init__(self, reader: io.BufferedIOBase, writer: io.BufferedIOBase) -> None:
        self._reader, self._writer = reader, writer
        self._writing = threading.Lock()
        self._buffer = bytearray()
        self.at_end = False
        """Whether the peer has closed the connection and everything was received."""

    def close(self) -> None:
        """End the conversation."""
        with suppress(OSError), self._reader, self._writer:  # unsent bytes are lost
            return

    def send(self, message: object, content: bytes = b"") -> None:
        """Send a message, followed by ``content``."""
        with self._writing:
            self._writer.write(encode(message))
            self._writer.write(content)
            self._writer.flush()

    def end_sending(self) -> None:
        """Tell the peer that no more will be sent."""
        with suppress(BrokenPipeError):  # it reads no more: unsent bytes are lost
            self._writer.close()

    def receive(self, kind: type[T], most_bytes: int = _MOST_LINE_BYTES) -> T | None:
        """Return the next message. Raises WrongMessage if it is not of the class ``kind`` or a direct subclass.

        Returns None if the peer has closed the connection, or no message ends within ``most_bytes``.
        """
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched >= most_bytes or not self._fill():
                return None
        return self._message(end, kind) if end < most_bytes else None

    def receive_within(self, seconds: float, kind: type[T]) -> list[T]:
        """Wait at most ``seconds`` for messages; return them as soon as any arrive, or the peer has closed.

        Raises WrongMessage as ``receive`` does, and BrokenOff for a message that is too long.
        """
        deadline = time.monotonic() + seconds
        searched = 0
        while self._buffer.find(b"\n", searched) < 0 and not self.at_end:
            if (searched := len(self._buffer)) >= _MOST_LINE_BYTES:
                raise BrokenOff(f"the peer sent {searched >> 20} MiB without the end of a message")
            if not select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return []
            self._fill()
        messages = []
        while (end := self._buffer.find(b"\n")) >= 0:
            messages.append(self._message(end, kind))
        return messages

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes. Raises BrokenOff if the peer sends fewer."""
        parts = [bytes(self._buffer[:count])]
        del self._buffer[:count]
        left = count - len(parts[0])
        while left and (part := self._reader.read1(min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
        if left:
            raise BrokenOff(f"the peer sent only {count - left} of {count} bytes")
        return b"".join(parts)

    def _fill(self) -> bool:
        """Read what has arrived, waiting for it if necessary; returns False if the peer has closed the connection."""
        new = self._reader.read1(_READ_BYTES)  # leaves nothing in the reader's buffer, which ``select`` does not see
        self._buffer += new
        self.at_end = not new
        return bool(new)

    def _message(self, end: int, kind: type[T]) -> T:
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return decode(line, kind)
        except BadMessage as error:
            raise WrongMessage(error) from error


def head_channel() -> Channel:
    """The channel to the head, over stdin and stdout of this process."""
    return Channel(open(0, "rb", closefd=False), open(1, "wb", closefd=False))
