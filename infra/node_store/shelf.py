"""Files that others may read while they still come: what one node of a chain passes on to the next."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.node_store.paths import within
from infra.node_store.pulling import Wanted, Watcher
from infra.node_store.wire import CHUNK_BYTES
from t5train.errors import StorageError

_SIGN_OF_LIFE_SECONDS = 5.0


@dataclass
class _Growth:
    """A file as it comes: ``size`` bytes of ``descriptor`` are there."""

    descriptor: int
    size: int
    discarded: bool = False
    """It came damaged, and comes again."""


class Shelf(Watcher):
    """Told by ``pull`` what is there; read by any number of threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._growths: dict[str, _Growth] = {}
        self._whole = set[str]()
        self._changed = threading.Condition()

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:
        """The first ``size`` bytes can be read; what was read of an earlier try is void."""
        with self._changed:
            self._forget(wanted.name)
            self._growths[wanted.name] = _Growth(os.open(path, os.O_RDONLY), size)
            self._changed.notify_all()

    def grown(self, wanted: Wanted, count: int) -> None:
        """More can."""
        with self._changed:
            self._growths[wanted.name].size += count
            self._changed.notify_all()

    def whole(self, wanted: Wanted) -> None:
        """All of it can, and from now on at its place."""
        with self._changed:
            self._whole.add(wanted.name)
            if growth := self._growths.pop(wanted.name, None):
                growth.size = wanted.size
                os.close(growth.descriptor)
            self._changed.notify_all()

    def read(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """As ``wire.Source`` has it; an empty chunk now and then while there is nothing to read."""
        opened = None
        try:
            while offset < size:
                opened = opened or self._opened(name)
                chunk = _read(opened, name, offset, size) if opened and self._has_beyond(opened[0], offset) else b""
                offset += len(chunk)
                yield chunk
        finally:
            if opened:
                os.close(opened[1])

    def _opened(self, name: str) -> tuple[_Growth | None, int] | None:
        """What others write to, None if it is whole, and a descriptor of one's own; nothing if it has not begun."""
        with self._changed:
            if name in self._whole:
                return None, os.open(within(self._folder, name), os.O_RDONLY)
            if name in self._growths:
                return self._growths[name], os.dup(self._growths[name].descriptor)
            self._changed.wait(_SIGN_OF_LIFE_SECONDS)
        return None

    def _has_beyond(self, growth: _Growth | None, offset: int) -> bool:
        with self._changed:
            if growth and growth.discarded:
                raise StorageError("it had come damaged: ask again")
            if growth is None or growth.size > offset:
                return True
            self._changed.wait(_SIGN_OF_LIFE_SECONDS)
        return False

    def _forget(self, name: str) -> None:
        if growth := self._growths.pop(name, None):
            growth.discarded = True
            os.close(growth.descriptor)


def _read(opened: tuple[_Growth | None, int], name: str, offset: int, size: int) -> bytes:
    growth, descriptor = opened
    available = growth.size if growth else size
    chunk = os.pread(descriptor, min(CHUNK_BYTES, available - offset), offset)
    if not chunk:
        raise StorageError(f"{name} ends after {offset} of {size} bytes: it was cut short")
    return chunk
