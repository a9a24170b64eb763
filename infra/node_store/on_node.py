"""The node's part: what it does when the head asks. Standard library only, so that it starts at once."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.node_store.inventory import inventory_of
from infra.node_store.node_channel import Telling, node_channel
from infra.node_store.paths import run_place, scratch_folder, within
from infra.node_store.pulling import Wanted, is_whole, listed, missing_bytes, pull
from infra.node_store.room import require_room
from infra.node_store.wire import files_in
from t5train.atomic_folder import discard, remove_discarded
from t5train.run_files import CHECKPOINTS


def inventory(request: dict[str, Any]) -> dict[str, Any]:
    """The tags of run ``run_name`` on this node."""
    return {"tags": {tag: asdict(copy) for tag, copy in inventory_of(_checkpoints(request)).items()}}


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """Which ``files`` of tag ``tag`` are not here, or not as they should be."""
    folder = within(_checkpoints(request), request["tag"])
    wanted = [Wanted(**each) for each in request["files"]]
    return {"bad": [each.name for each in wanted if not is_whole(folder, each)]}


def prune(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the ``tags`` from this node, and what removals that were killed have left."""
    checkpoints = _checkpoints(request)
    for tag in request["tags"]:
        discard(within(checkpoints, tag))
    remove_discarded(checkpoints)
    return {}


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """The files ``names`` of ``place``, with their digests."""
    folder = within(scratch_folder(request["scratch"]), request["place"])
    return {"files": [each.to_json() for each in listed(folder, request["names"])]}


def send(request: dict[str, Any]) -> None:
    """Send what is asked for of the folder ``place``, until stdin ends."""
    channel = node_channel()
    folder = within(scratch_folder(request["scratch"]), request["place"])
    while (message := channel.hear()) is not None:
        channel.answer(message, files_in(folder))


def receive(request: dict[str, Any]) -> None:
    """Take ``files`` into the folder ``place``, asking the head for what is not there whole."""
    scratch = scratch_folder(request["scratch"])
    folder, wanted = within(scratch, request["place"]), [Wanted(**each) for each in request["files"]]
    require_room(scratch, missing_bytes(folder, wanted), request["place"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    channel = node_channel()
    telling = Telling(channel)
    pull(channel.fetch, wanted, folder, telling)
    channel.say({"done": True})


def _checkpoints(request: dict[str, Any]) -> Path:
    return within(within(scratch_folder(request["scratch"]), run_place(request["run_name"])), CHECKPOINTS)
