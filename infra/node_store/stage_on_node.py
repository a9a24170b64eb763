"""A node of a chain: it takes a folder from the node before it, or the head, and passes it on while it comes."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.node_store import ownership, relay
from infra.node_store.garbage import size_of
from infra.node_store.node_channel import Telling, node_channel
from infra.node_store.occupancy import pin, staging_lock, unpin
from infra.node_store.paths import run_place, scratch_folder, within
from infra.node_store.pulling import Wanted, Watcher, missing_bytes, pull
from infra.node_store.room import require_room
from infra.node_store.shelf import Shelf
from infra.node_store.wire import Channel, Message


def stage(request: dict[str, Any]) -> None:
    """Take ``files`` into ``place`` for run ``run_name``, and serve them to who knows ``token`` until stdin ends."""
    scratch, place = scratch_folder(request["scratch"]), str(request["place"])
    folder, wanted = within(scratch, place), [Wanted(**each) for each in request["files"]]
    ownership.require_owner(scratch, run_place(request["run_name"]), request["owner"])
    with staging_lock(scratch, place):
        require_room(scratch, missing_bytes(folder, wanted), place, _still_to_write(scratch, request))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        head, shelf = node_channel(), Shelf(folder)
        head.say({"listening": asdict(relay.serve(shelf.read, request["token"]))})
        upstream = _Upstream(head, (head.hear() or {}).get("upstream"), request["token"])
        pull(upstream.read, wanted, folder, _Both(shelf, Telling(head)))
        pin(scratch, place, request["run_name"])
    head.say({"done": True})
    head.hear()  # others may read what is here until stdin ends


def _still_to_write(scratch: Path, request: Message) -> int:
    """Bytes that the run will write beside, less what it has written."""
    own = size_of(within(scratch, run_place(request["run_name"])))
    return max(0, int(request["beside_bytes"]) - own)


def release(request: dict[str, Any]) -> dict[str, Any]:
    """Run ``run_name`` has ended: what was staged for it may go when room is needed."""
    scratch, run_name = scratch_folder(request["scratch"]), request["run_name"]
    ownership.require_owner(scratch, run_place(run_name), request["owner"])
    unpin(scratch, run_name)
    ownership.release(scratch, run_name)
    return {}


class _Upstream:
    """The node before this one, as long as it is to be had; then the head, at the byte where the other broke off."""

    def __init__(self, head: Channel, neighbour: Message | None, token: str) -> None:
        self._head = head
        self._neighbour = self._connected(neighbour, token) if neighbour else None

    def read(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        """As ``wire.Source`` has it."""
        if self._neighbour is not None:
            try:
                for chunk in self._neighbour.fetch(name, offset, size):
                    offset += len(chunk)
                    yield chunk
            except OSError as error:  # Refused is none: then the neighbour is there
                self._give_up(error)
            else:
                return
        yield from self._head.fetch(name, offset, size)

    def _connected(self, neighbour: Message, token: str) -> Channel | None:
        try:
            return relay.connect(str(neighbour["address"]), int(neighbour["port"]), token)
        except OSError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        self._neighbour = None
        self._head.say({"alone": str(error)})


class _Both(Watcher):
    """Two watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def begun(self, wanted: Wanted, path: Path, size: int) -> None:
        """Both are told."""
        for each in self._watchers:
            each.begun(wanted, path, size)

    def grown(self, wanted: Wanted, count: int) -> None:
        """Both are told."""
        for each in self._watchers:
            each.grown(wanted, count)

    def whole(self, wanted: Wanted) -> None:
        """Both are told."""
        for each in self._watchers:
            each.whole(wanted)
