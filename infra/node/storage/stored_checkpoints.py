"""A run's checkpoints on a disk (a node's own, or the gathered copy), and the actions on those of a node.

Standard library only, as nodes import it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.node.attempts.run_ownership import NodeStore, require_owner
from infra.node.channel import Channel
from infra.node.messages import Done, Query, Request
from infra.node.node_folders import run_path, scratch_folder, set_aside_path, within
from infra.node.storage.disk_usage import require_disk_space
from infra.node.storage.file_channel import (
    AllArrived,
    FileRange,
    ProgressRelay,
    Wanted,
    answer,
    fetch_over,
    files_in,
)
from infra.node.storage.pull import listed, missing_bytes, pull
from t5train.errors import Unreadable
from t5train.files.atomic import discard, remove_discarded, set_aside
from t5train.files.presence import ABSENT, file_size, is_folder, names_in, reading
from t5train.files.run_folder import CHECKPOINTS, is_tag, unlisted

_SIDECAR = re.compile(r"rank-.*\.json")
HEAD = ""
"""The name of the gathered copy where other copies are named by their host."""


@dataclass(frozen=True)
class Copy:
    """What one disk has of a tag: the text of sidecars, and the size in bytes of all other files, by name."""

    sidecars: Mapping[str, str]
    files: Mapping[str, int]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Files that cannot be read now, and why; the name ``""`` stands for the folder itself."""


Inventory = Mapping[str, Copy]
"""What one disk has of each tag, by tag."""


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


@dataclass(frozen=True)
class StoredTags:
    """What a node has of a run's checkpoints."""

    tags: Inventory


@dataclass(frozen=True)
class ListCheckpoints(Query[StoredTags]):
    """List the tags of a run."""

    action = "inventory"
    store: NodeStore
    run_name: str


def inventory(request: ListCheckpoints) -> StoredTags:
    """List the tags of the run on this node."""
    return StoredTags(inventory_of(_checkpoints(request.store, request.run_name)))


@dataclass(frozen=True)
class PruneCheckpoints(Query[Done]):
    """Remove tags of a run."""

    action = "prune"
    store: NodeStore
    run_name: str
    tags: tuple[str, ...]


def prune(request: PruneCheckpoints) -> Done:
    """Remove the tags from this node, and leftovers of interrupted removals."""
    checkpoints = _checkpoints(request.store, request.run_name)
    for tag in request.tags:
        discard(within(checkpoints, tag))
    remove_discarded(checkpoints)
    return Done()


@dataclass(frozen=True)
class MovedAside:
    """The tags that existed, and were moved."""

    tags: tuple[str, ...]


@dataclass(frozen=True)
class MoveAside(Query[MovedAside]):
    """Set tags of a run aside (None: all of its tags)."""

    action = "move_aside"
    store: NodeStore
    run_name: str
    tags: tuple[str, ...] | None
    why: str


def move_aside(request: MoveAside) -> MovedAside:
    """Move those of the tags that exist to the set-aside folder."""
    checkpoints = _checkpoints(request.store, request.run_name)  # checks the owner
    here = [name for name in names_in(checkpoints) if is_tag(name)]
    chosen = [tag for tag in here if request.tags is None or tag in request.tags]
    for tag in chosen:
        set_aside(within(checkpoints, tag), _aside(request.store, request.run_name), request.why)
    return MovedAside(tuple(chosen))


@dataclass(frozen=True)
class FileList:
    """Files with their digests."""

    files: tuple[Wanted, ...]


@dataclass(frozen=True)
class ListFiles(Query[FileList]):
    """List the files named ``names`` in the folder ``relative_path``, and all files in subfolders with these names."""

    action = "listing"
    store: NodeStore
    relative_path: str
    names: tuple[str, ...]


def listing(request: ListFiles) -> FileList:
    """List those of the files that exist, with their digests."""
    _, folder = _folder_of(request.store, request.relative_path)
    return FileList(tuple(listed(folder, request.names)))


@dataclass(frozen=True)
class SendFiles(Request):
    """Send the files of the folder ``relative_path`` that the head requests."""

    action = "send"
    store: NodeStore
    relative_path: str


def send(request: SendFiles, head: Channel) -> None:
    """Send the requested files until stdin ends."""
    _, folder = _folder_of(request.store, request.relative_path)
    while (message := head.receive(FileRange)) is not None:
        answer(head, message, files_in(folder))


@dataclass(frozen=True)
class ReceiveFiles(Request):
    """Fetch files into the folder ``relative_path`` of a run."""

    action = "receive"
    store: NodeStore
    run_name: str
    relative_path: str
    files: tuple[Wanted, ...]
    recorded: tuple[str, ...] | None
    """Names of the files of the checkpoint. Other pickles in the folder are set aside; None: nothing is set aside."""


def receive(request: ReceiveFiles, head: Channel) -> None:
    """Fetch the files that are missing or damaged here from the head. Files that cannot be read now are set aside."""
    scratch, folder = _folder_of(request.store, request.relative_path)
    aside = _aside(request.store, request.run_name)
    if request.recorded is not None:
        for name in unlisted(names_in(folder), request.recorded):
            set_aside(folder / name, aside, "it is not from the save of the checkpoint that is resumed")
    missing, inodes = missing_bytes(folder, request.files), len(request.files)
    require_disk_space(scratch, missing, request.relative_path, needed_inodes=inodes)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    relay = ProgressRelay(head)
    pull(fetch_over(head), request.files, folder, relay, aside)
    relay.end()
    head.send(AllArrived())


def _aside(store: NodeStore, run_name: str) -> Path:
    return within(scratch_folder(store.scratch), set_aside_path(run_name))


def _checkpoints(store: NodeStore, run_name: str) -> Path:
    _, folder = _folder_of(store, run_path(run_name))
    return within(folder, CHECKPOINTS)


def _folder_of(store: NodeStore, relative_path: str) -> tuple[Path, Path]:
    """The scratch folder, and the requested folder within it. Raises RunOwned if that belongs to another run."""
    scratch = scratch_folder(store.scratch)
    require_owner(scratch, relative_path, store.owner)
    return scratch, within(scratch, relative_path)
