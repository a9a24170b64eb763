"""The node's end of a conversation with the head: its stdin and stdout."""

import time
from pathlib import Path

from infra.node_store.pulling import Wanted, Watcher
from infra.node_store.wire import CHUNK_BYTES, Channel

_TELL_SECONDS = 0.5


def node_channel() -> Channel:
    """What follows the first line of stdin, which was read unbuffered."""
    reader = open(0, "rb", buffering=CHUNK_BYTES, closefd=False)  # noqa: SIM115 - for as long as the process lives
    return Channel(reader, open(1, "wb", closefd=False))


class Telling(Watcher):
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
