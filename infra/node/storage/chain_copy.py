"""One node of a chain: it receives a folder from the node before it or the head, and serves it to others meanwhile."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.node.attempts import run_ownership
from infra.node.attempts.run_ownership import NodeStore
from infra.node.channel import CHUNK_BYTES, Channel
from infra.node.messages import Done, Query, Request
from infra.node.node_folders import run_path, scratch_folder, within
from infra.node.ports import Endpoint
from infra.node.storage import peer_connection
from infra.node.storage.disk_usage import pin, require_disk_space, staging_lock, unpin
from infra.node.storage.file_channel import AllArrived, FromReceiver, ProgressRelay, Wanted, Watcher, fetch_over
from infra.node.storage.garbage import size_of
from infra.node.storage.pull import missing_bytes, partial_path, pull
from t5train.errors import StorageError

_SIGN_OF_LIFE_SECONDS = 5.0


@dataclass
class _Growth:
    """A file that is still arriving: ``descriptor`` has ``size`` bytes so far."""

    descriptor: int
    size: int
    discarded: bool = False
    """Whether the file arrived damaged and is being sent again."""


class GrowingFiles(Watcher):
    """Files that ``pull`` is writing, and that any number of threads can read meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._growths: dict[str, _Growth] = {}
        self._whole = set[str]()
        self._changed = threading.Condition()

    def begun(self, wanted: Wanted, size: int) -> None:
        """The first ``size`` bytes can be read now. Bytes that were read before this call are invalid."""
        with self._changed:
            self._forget(wanted.name)
            partial = partial_path(within(self._folder, wanted.name))
            self._growths[wanted.name] = _Growth(os.open(partial, os.O_RDONLY), size)
            self._changed.notify_all()

    def grown(self, wanted: Wanted, count: int) -> None:
        """``count`` more bytes can be read now."""
        with self._changed:
            self._growths[wanted.name].size += count
            self._changed.notify_all()

    def whole(self, wanted: Wanted) -> None:
        """The whole file can be read now, at its final path."""
        with self._changed:
            self._whole.add(wanted.name)
            if growth := self._growths.pop(wanted.name, None):
                growth.size = wanted.size
                os.close(growth.descriptor)
            self._changed.notify_all()

    def read(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """As ``file_channel.Source``. While there is nothing to read, yields an empty chunk every few seconds."""
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
        """The growing file (None if it is whole) and a separate descriptor; None if the file has not begun."""
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
                raise StorageError("the file arrived damaged and is being sent again: request it again")
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
        raise StorageError(f"{name} ends after {offset} of {size} bytes: it was truncated")
    return chunk


@dataclass(frozen=True)
class Stage(Request):
    """Fetch files for a run, and serve them to other nodes until stdin ends."""

    action = "stage"
    store: NodeStore
    run_name: str
    relative_path: str
    files: tuple[Wanted, ...]
    token: str
    """The secret that all nodes of the chain know."""
    beside_bytes: int
    """How many bytes the run will write on this disk in addition."""


@dataclass(frozen=True)
class Listening:
    """Where a node serves its files to other nodes."""

    server: Endpoint


@dataclass(frozen=True)
class Upstream:
    """The node before this one in the chain; None for the first."""

    server: Endpoint | None


@dataclass(frozen=True)
class ChainBroken(FromReceiver):
    """Reports to the head that the node now copies from the head, and why it cannot read from the node before it."""

    reason: str


def stage(request: Stage, head: Channel) -> None:
    """Fetch the files into ``relative_path``, and serve them to other nodes until stdin ends."""
    scratch, relative_path = scratch_folder(request.store.scratch), request.relative_path
    folder, wanted = within(scratch, relative_path), request.files
    run_ownership.require_owner(scratch, run_path(request.run_name), request.store.owner)
    with staging_lock(scratch, relative_path):
        beside, inodes = _still_to_write(scratch, request), len(wanted)
        require_disk_space(scratch, missing_bytes(folder, wanted), relative_path, beside, inodes)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        growing = GrowingFiles(folder)
        head.send(Listening(peer_connection.serve(growing.read, request.token)))
        upstream = _Upstream(head, head.receive(Upstream) or Upstream(None), request.token)
        relay = ProgressRelay(head)
        pull(upstream.read, wanted, folder, _Both(growing, relay))
        relay.end()
        pin(scratch, relative_path, request.run_name)
    head.send(AllArrived())
    head.receive(Upstream)  # waits for the end of stdin: until then, other nodes may read these files


def _still_to_write(scratch: Path, request: Stage) -> int:
    """Bytes that the run will write in addition, less what it has already written."""
    own = size_of(within(scratch, run_path(request.run_name)))
    return max(0, request.beside_bytes - own)


@dataclass(frozen=True)
class ReleaseRun(Query[Done]):
    """Release what was staged for a run that has ended, so that it can be removed when disk space is needed."""

    action = "release"
    store: NodeStore
    run_name: str


def release(request: ReleaseRun) -> Done:
    """Remove the run's pins and its lease on this node."""
    scratch, run_name = scratch_folder(request.store.scratch), request.run_name
    run_ownership.require_owner(scratch, run_path(run_name), request.store.owner)
    unpin(scratch, run_name)
    run_ownership.release(scratch, run_name)
    return Done()


class _Upstream:
    """Reads from the node before this one while it is available, then from the head, where that node stopped."""

    def __init__(self, head: Channel, upstream: Upstream, token: str) -> None:
        self._head, self._from_head = head, fetch_over(head)
        self._neighbour = self._connected(upstream.server, token) if upstream.server else None

    def read(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """As ``file_channel.Source``."""
        if self._neighbour is not None:
            try:
                for chunk in fetch_over(self._neighbour)(name, offset, size):
                    offset += len(chunk)
                    yield chunk
            except OSError as error:  # not Refused: after that, the neighbour is still available
                self._give_up(error)
            else:
                return
        yield from self._from_head(name, offset, size)

    def _connected(self, server: Endpoint, token: str) -> Channel | None:
        try:
            return peer_connection.connect(server, token)
        except OSError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        self._neighbour = None
        self._head.send(ChainBroken(str(error)))


class _Both(Watcher):
    """Notifies two watchers."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def begun(self, wanted: Wanted, size: int) -> None:
        """Notify both."""
        for each in self._watchers:
            each.begun(wanted, size)

    def grown(self, wanted: Wanted, count: int) -> None:
        """Notify both."""
        for each in self._watchers:
            each.grown(wanted, count)

    def whole(self, wanted: Wanted) -> None:
        """Notify both."""
        for each in self._watchers:
            each.whole(wanted)
