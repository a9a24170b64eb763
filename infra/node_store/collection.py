"""The head finds and frees what no run needs: on all nodes, and under its own root."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from infra.node_store.garbage import Garbage, size_of
from infra.node_store.inventory import HEAD, inventory_of
from infra.node_store.nodes import Nodes
from infra.node_store.paths import name_on_nodes
from infra.node_store.tags import superfluous
from infra.run_lock import holder, run_lock
from t5train.atomic_folder import discard
from t5train.errors import HostError, RecordError, RunLocked, UnknownVersion, Unreadable
from t5train.presence import visible_in
from t5train.records import Checkpoint
from t5train.run_files import CHECKPOINTS, RUNS

_DEADLINE_SECONDS = 600.0
_log = logging.getLogger(__name__)


def finished_runs(root: Path) -> list[str]:
    """The runs under a root that have ended and that nobody works on, by ``name_on_nodes``."""
    found = []
    for folder in _runs(root):
        try:
            found.append(name_on_nodes(folder.name, Checkpoint.load(folder).fingerprint))
        except RecordError:
            continue
        except (Unreadable, UnknownVersion) as error:
            _log.warning("what hosts have of %s is kept: %s", folder.name, error)
    return found


def garbage_on(nodes: Nodes, finished: Sequence[str]) -> dict[str, list[Garbage] | HostError]:
    """What no run needs on each host; of one that does not answer, the error."""
    answers = nodes.ask("garbage", lambda _: nodes.request(finished=list(finished)), _DEADLINE_SECONDS)
    return {
        host: each if isinstance(each, HostError) else [Garbage(**one) for one in each["found"]]
        for host, each in answers.items()
    }


def free_on(
    nodes: Nodes, finished: Sequence[str], found: Mapping[str, Sequence[Garbage]]
) -> dict[str, list[str] | HostError]:
    """Remove that, as far as no run has come to need it; the places that were removed, by host."""

    def request(host: str) -> dict[str, object]:
        return nodes.request(finished=list(finished), places=[each.place for each in found.get(host, [])])

    answers = nodes.ask("free", request, _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else each["freed"] for host, each in answers.items()}


def garbage_under(root: Path) -> Iterator[Garbage]:
    """What no run needs of the checkpoints under a root: what was never finished and is older than one that was."""
    for run in _runs(root):
        yield from _garbage_in(root, run)


def free_under(root: Path, found: Sequence[Garbage]) -> list[str]:
    """Remove that, as far as no run has come to need it; the places that were removed."""
    asked, freed = {each.place for each in found}, list[str]()
    for run in _runs(root):
        try:
            with run_lock(run, wait_seconds=0):
                freed += _free_in(root, run, asked)
        except RunLocked as error:
            _log.warning("%s", error)
    return freed


def _free_in(root: Path, run: Path, asked: Collection[str]) -> list[str]:
    freed = [each.place for each in _garbage_in(root, run) if each.place in asked]
    for place in freed:
        discard(root / place)
    return freed


def _garbage_in(root: Path, run: Path) -> Iterator[Garbage]:
    checkpoints = run / CHECKPOINTS
    tags = {HEAD: inventory_of(checkpoints)}
    names = [*superfluous(tags, keep_last=len(tags[HEAD]) or 1), *_half_removed(checkpoints)]
    for folder in (checkpoints / name for name in names):
        yield Garbage(str(folder.relative_to(root)), size_of(folder), "a checkpoint that is not whole")


def _half_removed(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob(".*.discarded"))


def _runs(root: Path) -> Iterator[Path]:
    """Runs that nobody works on."""
    return (folder for folder in visible_in(root / RUNS) if folder.is_dir() and holder(folder) is None)
