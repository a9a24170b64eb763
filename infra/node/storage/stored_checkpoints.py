"""A run's checkpoints on a disk (a node's own, or the gathered copy), and what a node does with its own.

Standard library only, as nodes import it.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.node.attempts.run_ownership import require_owner
from infra.node.node_folders import aside_place, run_place, scratch_folder, within
from infra.node.storage.disk_usage import require_room
from infra.node.storage.file_channel import ProgressRelay, Wanted, files_in, node_channel
from infra.node.storage.pull import listed, missing_bytes, pull
from t5train.errors import Unreadable
from t5train.files.atomic import discard, remove_discarded
from t5train.files.presence import ABSENT, file_size, is_folder, names_in, reading
from t5train.files.run_folder import CHECKPOINTS, is_tag, unlisted
from t5train.files.set_aside import set_aside

_SIDECAR = re.compile(r"rank-.*\.json")
HEAD = ""
"""Stands for the gathered copy where other copies are named by their host."""


@dataclass(frozen=True)
class Copy:
    """What one disk has of a tag: the text of sidecars, and the size in bytes of all other files, by name."""

    sidecars: Mapping[str, str]
    files: Mapping[str, int]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Files that cannot be read there now, and why; the name ``""`` stands for the folder itself."""


Inventory = Mapping[str, Copy]
"""By tag."""


def inventory_of(checkpoints: Path) -> Inventory:
    """The tags in a folder of checkpoints, except those being written or removed; empty if there is no such folder.

    Raises Unreadable if the folder itself cannot be listed.
    """
    tags = {name: _copy_of(checkpoints / name) for name in names_in(checkpoints) if not name.startswith(".")}
    return {name: copy for name, copy in tags.items() if copy is not None}


def _copy_of(folder: Path) -> Copy | None:
    texts, sizes, unreadable = dict[str, str](), dict[str, int](), dict[str, str]()
    try:
        if not is_folder(folder):
            return None
        names = [name for name in names_in(folder) if not name.startswith(".")]
    except Unreadable as error:
        return Copy({}, {}, {"": str(error)})
    for name in names:
        try:
            if _SIDECAR.fullmatch(name):
                with reading(folder / name):
                    texts[name] = (folder / name).read_text("utf-8", "replace")
            elif (size := file_size(folder / name)) is not None:
                sizes[name] = size
        except Unreadable as error:
            unreadable[name] = str(error)
        except ABSENT:
            continue  # removed since the folder was listed
    return Copy(texts, sizes, unreadable)


def inventory(request: dict[str, Any]) -> dict[str, Any]:
    """The tags of run ``run_name`` on this node."""
    return {"tags": {tag: asdict(copy) for tag, copy in inventory_of(_checkpoints(request)).items()}}


def prune(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the ``tags`` from this node, and what interrupted removals have left."""
    checkpoints = _checkpoints(request)
    for tag in request["tags"]:
        discard(within(checkpoints, tag))
    remove_discarded(checkpoints)
    return {}


def move_aside(request: dict[str, Any]) -> dict[str, Any]:
    """Move the ``tags`` (None: all of the run) to where nothing uses or removes them; the answer says which existed."""
    checkpoints = _checkpoints(request)  # which checks the owner
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
    """Send the requested files of the folder ``place`` until stdin ends."""
    channel = node_channel()
    _, folder = _place(request)
    while (message := channel.hear()) is not None:
        channel.answer(message, files_in(folder))


def receive(request: dict[str, Any]) -> None:
    """Fetch ``files`` into the folder ``place`` of a run, requesting from the head those that are not intact there.

    Files that cannot be read now are moved aside, and so are pickles that are not in ``recorded``, unless it is None.
    """
    scratch, folder = _place(request)
    wanted = [Wanted(**each) for each in request["files"]]
    if request["recorded"] is not None:
        for name in unlisted(names_in(folder), request["recorded"]):
            set_aside(folder / name, _aside(request), "it is not from the save of the checkpoint that is resumed")
    require_room(scratch, missing_bytes(folder, wanted), request["place"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    channel = node_channel()
    telling = ProgressRelay(channel)
    pull(channel.fetch, wanted, folder, telling, _aside(request))
    channel.say({"done": True})


def _aside(request: dict[str, Any]) -> Path:
    return within(scratch_folder(request["scratch"]), aside_place(request["run_name"]))


def _checkpoints(request: dict[str, Any]) -> Path:
    _, folder = _place(request | {"place": run_place(request["run_name"])})
    return within(folder, CHECKPOINTS)


def _place(request: dict[str, Any]) -> tuple[Path, Path]:
    """The scratch folder, and the requested folder within it; RunOwned if that belongs to another head's run."""
    scratch = scratch_folder(request["scratch"])
    require_owner(scratch, request["place"], request["owner"])
    return scratch, within(scratch, request["place"])
