"""The head finds and frees what no run needs: on all nodes, and under its own root."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.node_folder import heads_folder
from infra.node_store.finished import FinishedRun, idle_runs
from infra.node_store.garbage import KEPT_ASIDE, Garbage, size_of
from infra.node_store.inventory import HEAD, inventory_of
from infra.node_store.left_attempts import KnownAttempts, left_attempts
from infra.node_store.nodes import Nodes
from infra.node_store.tags import superfluous
from infra.run_lock import run_lock
from t5train.atomic_folder import discard
from t5train.errors import HostError, RunLocked
from t5train.presence import is_folder
from t5train.run_files import CHECKPOINTS, SET_ASIDE

_DEADLINE_SECONDS = 600.0
_log = logging.getLogger(__name__)


def garbage_on(
    nodes: Nodes, finished: Sequence[FinishedRun], attempts: KnownAttempts
) -> dict[str, list[Garbage] | HostError]:
    """What no run needs on each host; of one that does not answer, the error."""
    answers = nodes.ask("garbage", lambda _: _request(nodes, finished, attempts), _DEADLINE_SECONDS)
    return {
        host: each if isinstance(each, HostError) else [Garbage(**one) for one in each["found"]]
        for host, each in answers.items()
    }


def free_on(
    nodes: Nodes,
    finished: Sequence[FinishedRun],
    attempts: KnownAttempts,
    found: Mapping[str, Sequence[Garbage]],
) -> dict[str, list[str] | HostError]:
    """Remove that, as far as no run has come to need it; the places that were removed, by host.

    The head's copy of ``finished`` runs must be ``verified``.
    """

    def request(host: str) -> dict[str, Any]:
        places = [each.place for each in found.get(host, []) if not each.is_kept]
        return _request(nodes, finished, attempts, places=places)

    answers = nodes.ask("free", request, _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else each["freed"] for host, each in answers.items()}


def _request(nodes: Nodes, finished: Sequence[FinishedRun], attempts: KnownAttempts, **facts: Any) -> dict[str, Any]:
    runs = {run.name: run.to_json() for run in finished}
    return nodes.request(finished=runs, attempts=attempts.to_json(), **facts)


def garbage_of_heads(attempts: KnownAttempts) -> Iterator[Garbage]:
    """What heads of this machine have left of attempts over hosts; places are absolute."""
    for folder, why in left_attempts(heads_folder(), attempts):
        yield Garbage(str(folder), size_of(folder), why)


def free_of_heads(attempts: KnownAttempts, found: Sequence[Garbage]) -> list[str]:
    """Remove that, as far as nobody has come to need it."""
    asked = {each.place for each in found}
    freed = [each.place for each in garbage_of_heads(attempts) if each.place in asked]
    for place in freed:
        discard(Path(place))
    return freed


def garbage_under(root: Path) -> Iterator[Garbage]:
    """What no run needs of the checkpoints under a root: what was never finished and is older than one that was."""
    for run in idle_runs(root):
        yield from _garbage_in(root, run)


def free_under(root: Path, found: Sequence[Garbage]) -> list[str]:
    """Remove that, as far as no run has come to need it; the places that were removed."""
    asked, freed = {each.place for each in found}, list[str]()
    for run in idle_runs(root):
        try:
            with run_lock(run, wait_seconds=0):
                freed += _free_in(root, run, asked)
        except RunLocked as error:
            _log.warning("%s", error)
    return freed


def _free_in(root: Path, run: Path, asked: Collection[str]) -> list[str]:
    freed = [each.place for each in _garbage_in(root, run) if each.place in asked and not each.is_kept]
    for place in freed:
        discard(root / place)
    return freed


def _garbage_in(root: Path, run: Path) -> Iterator[Garbage]:
    checkpoints = run / CHECKPOINTS
    tags = {HEAD: inventory_of(checkpoints)}
    names = [*superfluous(tags, keep_last=len(tags[HEAD]) or 1), *_half_removed(checkpoints)]
    for folder in (checkpoints / name for name in names):
        yield Garbage(str(folder.relative_to(root)), size_of(folder), "a checkpoint that is not whole")
    if is_folder(aside := run / SET_ASIDE):
        yield Garbage(str(aside.relative_to(root)), size_of(aside), KEPT_ASIDE, is_kept=True)


def _half_removed(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob(".*.discarded"))
