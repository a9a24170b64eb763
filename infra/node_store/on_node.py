"""The node's part: what it does when the head asks. Standard library only, so that it starts at once."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from infra.node_store.inventory import inventory_of
from infra.node_store.node_channel import Telling, node_channel
from infra.node_store.ownership import require_owner
from infra.node_store.paths import aside_place, run_place, scratch_folder, within
from infra.node_store.pulling import Wanted, listed, missing_bytes, pull
from infra.node_store.room import require_room
from infra.node_store.wire import files_in
from t5train.atomic_folder import discard, remove_discarded
from t5train.presence import names_in
from t5train.run_files import CHECKPOINTS, is_tag
from t5train.set_aside import set_aside
from t5train.unlisted_files import unlisted


def inventory(request: dict[str, Any]) -> dict[str, Any]:
    """The tags of run ``run_name`` on this node."""
    return {"tags": {tag: asdict(copy) for tag, copy in inventory_of(_checkpoints(request)).items()}}


def prune(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the ``tags`` from this node, and what removals that were killed have left."""
    checkpoints = _checkpoints(request)
    for tag in request["tags"]:
        discard(within(checkpoints, tag))
    remove_discarded(checkpoints)
    return {}


def move_aside(request: dict[str, Any]) -> dict[str, Any]:
    """Move the ``tags`` where nothing uses or removes them (None: all of the run); the answer says which were here."""
    checkpoints = _checkpoints(request)  # which asks for the owner
    here = [name for name in names_in(checkpoints) if is_tag(name)]
    chosen = [tag for tag in here if request["tags"] is None or tag in request["tags"]]
    for tag in chosen:
        set_aside(within(checkpoints, tag), _aside(request), request["why"])
    return {"tags": chosen}


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """The files ``names`` of ``place``, with their digests."""
    _, folder = _place(request)
    return {"files": [each.to_json() for each in listed(folder, request["names"])]}


def send(request: dict[str, Any]) -> None:
    """Send what is asked for of the folder ``place``, until stdin ends."""
    channel = node_channel()
    _, folder = _place(request)
    while (message := channel.hear()) is not None:
        channel.answer(message, files_in(folder))


def receive(request: dict[str, Any]) -> None:
    """Take ``files`` into the folder ``place`` of a run, asking the head for what is not there whole.

    What cannot be read now is moved aside; so is a pickle that is not one of ``recorded``, unless that is None.
    """
    scratch, folder = _place(request)
    wanted = [Wanted(**each) for each in request["files"]]
    if request["recorded"] is not None:
        for name in unlisted(names_in(folder), request["recorded"]):
            set_aside(folder / name, _aside(request), "it is of another saving than the one that is resumed")
    require_room(scratch, missing_bytes(folder, wanted), request["place"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    channel = node_channel()
    telling = Telling(channel)
    pull(channel.fetch, wanted, folder, telling, _aside(request))
    channel.say({"done": True})


def _aside(request: dict[str, Any]) -> Path:
    return within(scratch_folder(request["scratch"]), aside_place(request["run_name"]))


def _checkpoints(request: dict[str, Any]) -> Path:
    _, folder = _place(request | {"place": run_place(request["run_name"])})
    return within(folder, CHECKPOINTS)


def _place(request: dict[str, Any]) -> tuple[Path, Path]:
    """The scratch folder, and the folder within it that is asked for; RunOwned if that is of another head's run."""
    scratch = scratch_folder(request["scratch"])
    require_owner(scratch, request["place"], request["owner"])
    return scratch, within(scratch, request["place"])
