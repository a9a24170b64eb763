"""What all places hold of a run's checkpoints, asked, verified and pruned from the head."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infra.node_store.inventory import HEAD, Copy, Inventory, inventory_of
from infra.node_store.nodes import Nodes
from t5train.confined import child
from t5train.errors import HostError, StorageError

_DEADLINE_SECONDS = 120.0
_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Survey:
    """What all places hold of a run's checkpoints."""

    found: Mapping[str, Inventory]
    """By place: the head's gathered copy, and each node that answered."""
    silent: Mapping[str, HostError]
    """Why the other nodes did not."""


def survey(nodes: Nodes, run_name: str, checkpoints: Path) -> Survey:
    """Ask all nodes what they hold, and look at the gathered copy."""
    answers = nodes.ask("inventory", lambda _: nodes.request(run_name=run_name), _DEADLINE_SECONDS)
    silent = {host: answer for host, answer in answers.items() if isinstance(answer, HostError)}
    heard = {
        host: {tag: _copy(host, copy) for tag, copy in _plainly_named(host, answer["tags"]).items()}
        for host, answer in answers.items()
        if not isinstance(answer, HostError)
    }
    return Survey({HEAD: inventory_of(checkpoints), **heard}, silent)


def _copy(host: str, told: Mapping[str, Any]) -> Copy:
    """What a host has of a tag; why something cannot be read is only ever shown, whatever it is called there."""
    sidecars, files = _plainly_named(host, told["sidecars"]), _plainly_named(host, told["files"])
    return Copy(sidecars, files, {str(name): str(why) for name, why in told["unreadable"].items()})


def _plainly_named(host: str, told: Mapping[str, T]) -> dict[str, T]:
    """What a host lists, without names that would lead out of the folder of checkpoints here."""
    found = {}
    for name, each in told.items():
        try:
            child(Path(), name, host)
        except StorageError as error:
            _log.warning("left out of the checkpoints on %s: %s", host, error)
            continue
        found[name] = each
    return found


def prune_on(nodes: Nodes, run_name: str, tags: list[str]) -> dict[str, HostError | None]:
    """Remove these tags from all nodes, and what is left of others; the error of each that did not."""
    answers = nodes.ask("prune", lambda _: nodes.request(run_name=run_name, tags=tags), _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else None for host, each in answers.items()}


def move_aside_on(nodes: Nodes, run_name: str, tags: list[str] | None, why: str) -> dict[str, list[str] | HostError]:
    """Have all nodes move these tags (None: all) where nothing uses or removes them; those that each had."""
    request = nodes.request(run_name=run_name, tags=tags, why=why)
    answers = nodes.ask("move_aside", lambda _: request, _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else each["tags"] for host, each in answers.items()}
