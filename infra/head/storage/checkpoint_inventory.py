"""What the head and all nodes hold of a run's checkpoints, which of them are complete, and which to keep.

A tag can be saved twice: the second time after the gathered copy of the first save was found damaged. Sidecars of two
saves must not be mixed. Therefore, the sidecars of a tag are taken from one *version* of it: those on the head alone,
those on the nodes alone, or all together, in this order. Other files are taken from any location that has one of the
right size; their digests are verified when they are gathered.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from infra.head.hosts.nodes import Nodes
from infra.node.storage.stored_checkpoints import (
    HEAD,
    Copy,
    Inventory,
    ListCheckpoints,
    MoveAside,
    PruneCheckpoints,
    inventory_of,
)
from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.retention import kept
from t5train.checkpoint.sidecar import Sidecar
from t5train.errors import HostError, IncompleteCheckpoint, StorageError
from t5train.files import run_folder
from t5train.files.confined import child
from t5train.files.run_folder import is_tag_or_removed
from t5train.records.digests import FileDigest

_DEADLINE_SECONDS = 120.0
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Survey:
    """What the head and all nodes hold of a run's checkpoints."""

    found: Mapping[str, Inventory]
    """By location: the head's gathered copy, and each node that answered."""
    silent: Mapping[str, HostError]
    """Why the other nodes did not answer."""


def survey(nodes: Nodes, run_name: str, checkpoints: Path) -> Survey:
    """Ask all nodes which checkpoints they hold, and inspect the gathered copy."""
    answers = nodes.ask(ListCheckpoints(nodes.store, run_name), _DEADLINE_SECONDS)
    silent = {host: answer for host, answer in answers.items() if isinstance(answer, HostError)}
    reply = {
        host: {tag: _copy(host, copy) for tag, copy in _plainly_named(host, answer.tags).items()}
        for host, answer in answers.items()
        if not isinstance(answer, HostError)
    }
    return Survey({HEAD: inventory_of(checkpoints), **reply}, silent)


def _copy(host: str, copy: Copy) -> Copy:
    """What a host has of a tag. Names of unreadable files are not validated, because they are only displayed."""
    return replace(copy, sidecars=_plainly_named(host, copy.sidecars), files=_plainly_named(host, copy.files))


def _plainly_named(host: str, reported: Mapping[str, T]) -> dict[str, T]:
    """Drop the entries of a host's list whose names would lead out of the checkpoint folder on this machine."""
    found = {}
    for name, each in reported.items():
        try:
            child(Path(), name, host)
        except StorageError as error:
            _log.warning("ignoring a file in the checkpoints on %s: %s", host, error)
            continue
        found[name] = each
    return found


def prune_on(nodes: Nodes, run_name: str, tags: list[str]) -> dict[str, HostError | None]:
    """Remove these tags, and leftovers of earlier removals, from all nodes; returns each node's error, or None."""
    answers = nodes.ask(PruneCheckpoints(nodes.store, run_name, tuple(tags)), _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else None for host, each in answers.items()}


def move_aside_on(nodes: Nodes, run_name: str, tags: list[str] | None, why: str) -> dict[str, list[str] | HostError]:
    """Set these tags (None: all) aside on all nodes; returns the tags that each node had, or its error."""
    request = MoveAside(nodes.store, run_name, None if tags is None else tuple(tags), why)
    answers = nodes.ask(request, _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else list(each.tags) for host, each in answers.items()}


Inventories = Mapping[str, Inventory]
"""By location."""


@dataclass(frozen=True)
class FoundTag:
    """A version of a tag that is complete when the files of all locations are combined."""

    name: str
    step: int
    texts: Mapping[str, str]
    """Its sidecars, by name."""
    sidecars: Sequence[Sidecar]
    files: Mapping[str, FileDigest]
    places: Mapping[str, tuple[str, ...]]
    """Where each file is, judging by its size: the head first, then nodes that wrote it, then other nodes."""


def complete_tags(found: Inventories) -> list[FoundTag]:
    """Return the complete versions of all tags, newest step first; versions of one tag in the order given above."""
    return sorted(_complete(found), key=lambda tag: (tag.step, tag.name), reverse=True)


def missing_parts(found: Inventories) -> dict[str, str]:
    """Return why each incomplete tag is not complete, by name, newest first."""
    complete = {tag.name for tag in complete_tags(found)}
    return {name: _why(name, found) for name in sorted(_names(found) - complete, reverse=True)}


def prunable(
    found: Inventories, keep_last: int, keep_every: int | None = None, most_bytes: int | None = None
) -> list[str]:
    """Return the tags to remove: complete ones that are not ``kept``. ``most_bytes`` applies to each location.

    Incomplete tags are removed if they are older than the newest complete one; ranks may still be writing a newer one.
    An incomplete tag with a file that cannot be read now is kept.
    """
    complete = complete_tags(found)
    steps, bests = {tag.name: tag.step for tag in complete}, {tag.step: tag.sidecars[0].best_step for tag in complete}
    keep = kept({step: _size(name, found) for name, step in steps.items()}, keep_last, keep_every, most_bytes, bests)
    newest = max(steps, key=lambda name: steps[name], default="")
    incomplete = _names(found) - steps.keys() - unreadable(found).keys()
    left_over = {name for name in incomplete if is_tag_or_removed(name) and name < newest}
    return sorted({name for name, step in steps.items() if step not in keep} | left_over)


def unreadable(found: Inventories) -> dict[str, str]:
    """Return the tags with a file that some location cannot read now, and why."""
    return {
        name: f"{_called(place)}: {next(iter(copy.unreadable.values()))}"
        for place, inventory in found.items()
        for name, copy in inventory.items()
        if copy.unreadable
    }


def finished_once(found: Inventories) -> set[str]:
    """Return the tags that have the sidecars of all ranks: these were complete once, even if files are missing now."""
    return {name for name in _names(found) for places in _versions(found) if _is_finished(name, places, found)}


def _is_finished(name: str, places: Sequence[str], found: Inventories) -> bool:
    try:
        return _sidecars(name, _texts(name, places, found))[0].tag == name
    except IncompleteCheckpoint:
        return False


def require_listed(tag: FoundTag, found: Inventories) -> None:
    """Raise UnlistedFile if a location with sidecars of this save has a pickle that no rank recorded.

    In a location without such a sidecar, the pickle is left over from another save; restoring sets it aside.
    """
    for place, inventory in found.items():
        copy = inventory.get(tag.name)
        if copy and any(copy.sidecars.get(name) == text for name, text in tag.texts.items()):
            run_folder.require_listed(f"checkpoint {tag.name} on {_called(place)}", copy.files, tag.files)


def _size(name: str, found: Inventories) -> int:
    """Size of a tag in bytes, in the location where it is largest."""
    return max(sum(inventory[name].files.values()) for inventory in found.values() if name in inventory)


def _names(found: Inventories) -> set[str]:
    return {name for inventory in found.values() for name in inventory}


def _complete(found: Inventories) -> Iterator[FoundTag]:
    for name in _names(found):
        known = set[frozenset[tuple[str, str]]]()
        for places in _versions(found):
            try:
                tag = _version(name, places, found)
            except IncompleteCheckpoint:
                continue
            if frozenset(tag.texts.items()) not in known:
                known.add(frozenset(tag.texts.items()))
                yield tag


def _versions(found: Inventories) -> list[list[str]]:
    """The sets of locations from which the sidecars of a tag may be combined."""
    nodes = [place for place in found if place != HEAD]
    return [[HEAD], nodes, [HEAD, *nodes]]


def _version(name: str, places: Sequence[str], found: Inventories) -> FoundTag:
    """The tag according to the sidecars at ``places``. Raises IncompleteCheckpoint with what is missing or wrong."""
    texts = _texts(name, places, found)
    sidecars = _sidecars(name, texts)
    if sidecars[0].tag != name:
        raise IncompleteCheckpoint(
            f"{name} was renamed: its sidecars (rank-*.json) name the tag {sidecars[0].tag}. Rename it back"
        )
    files = tags.files_of(sidecars)
    holders = {file: tuple(_holders(name, file, digest.size, texts, found)) for file, digest in files.items()}
    for file, where in holders.items():
        if not where:
            rank = next(each.rank for each in sidecars if file in each.files)
            raise IncompleteCheckpoint(
                f"{name} lacks {file}, which rank {rank} wrote: neither the head nor any host has a copy"
            )
    return FoundTag(name, sidecars[0].step, texts, sidecars, files, holders)


def _sidecars(name: str, texts: Mapping[str, str]) -> list[Sidecar]:
    parsed = [sidecar.parsed(text, Path(name) / file) for file, text in sorted(texts.items())]
    return tags.require_agreement(parsed, name)


def _texts(name: str, places: Sequence[str], found: Inventories) -> dict[str, str]:
    texts, seen = dict[str, str](), dict[str, str]()
    for place in places:
        copy = found.get(place, {}).get(name)
        for file, text in copy.sidecars.items() if copy else ():
            if texts.setdefault(file, text) != text:
                raise IncompleteCheckpoint(
                    f"{name} has {file} from two different saves, on {_called(seen[file])} and on {_called(place)}"
                )
            seen.setdefault(file, place)
    return texts


def _holders(name: str, file: str, size: int, texts: Mapping[str, str], found: Inventories) -> list[str]:
    copies = {place: inventory[name] for place, inventory in found.items() if name in inventory}
    holding = [place for place, copy in copies.items() if copy.files.get(file) == size]

    def distance(place: str) -> int:
        wrote = any(file in text and copies[place].sidecars.get(one) == text for one, text in texts.items())
        return 0 if place == HEAD else 1 if wrote else 2

    return sorted(holding, key=distance)


def _why(name: str, found: Inventories) -> str:
    try:
        _version(name, [HEAD, *(place for place in found if place != HEAD)], found)
    except IncompleteCheckpoint as error:
        return str(error)
    raise AssertionError(f"{name} is complete")


def _called(place: str) -> str:
    return place or "the head"
