"""Finds and removes files that no run needs, on all nodes and under the head's own root.

A node's copy of a finished run is removed only if the head's copy of the last checkpoint has been verified.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from infra.head.hosts.nodes import Nodes
from infra.head.storage.checkpoint_inventory import prunable
from infra.node.attempts import attempt
from infra.node.attempts.run_lock import holder, run_lock
from infra.node.node_folders import heads_folder, name_on_nodes
from infra.node.storage.garbage import KEPT_ASIDE, FindGarbage, Finished, FreeGarbage, Garbage, HeadRuns, size_of
from infra.node.storage.left_attempts import KnownAttempts, left_attempts
from infra.node.storage.stored_checkpoints import HEAD, inventory_of
from t5train.checkpoint.resume import load_run_spec, unique_id
from t5train.errors import HostError, RecordError, RunLocked, T5TrainError, UnknownVersion, Unreadable
from t5train.files.atomic import discard, remove_folder
from t5train.files.presence import is_there, names_in, visible_in
from t5train.files.run_folder import ATTEMPTS, CHECKPOINTS, RUN, RUNS, SET_ASIDE, discarded, removing
from t5train.progress import Progress
from t5train.quantities import quantity
from t5train.records import start_copy
from t5train.records.stage_records import Checkpoint
from t5train.records.start_copy import START_NOTE, STARTS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """A run whose last checkpoint is recorded and that no process is working on."""

    folder: Path
    name: str
    """Its name on nodes."""
    unique_id: str | None
    """None for a run of an earlier version of this package."""
    fault: str = ""
    """What is wrong with the head's copy; empty if nothing is. With a fault, the run's files on hosts are kept."""


def finished_runs(root: Path) -> list[FinishedRun]:
    """Return the finished runs under a root. Only the sizes of their files are checked."""
    found = []
    for folder in idle_runs(root):
        try:
            record = Checkpoint.load(folder)
        except RecordError:
            continue
        except (Unreadable, UnknownVersion) as error:
            _log.warning("keeping the files of %s on hosts: %s", folder.name, error)
            continue
        name = name_on_nodes(folder.name, record.fingerprint)
        found.append(FinishedRun(folder, name, unique_id(folder), _fault(record)))
    return found


def verified(runs: Iterable[FinishedRun], names: Collection[str], progress: Progress) -> Iterator[FinishedRun]:
    """Yield the same runs, after verifying the digests of all files of those that are called ``names`` on nodes."""
    for run in runs:
        if run.fault or run.name not in names:
            yield run
            continue
        try:
            Checkpoint.load(run.folder).verify(progress)
            yield run
        except T5TrainError as error:
            yield replace(run, fault=str(error))


def idle_runs(root: Path) -> Iterator[Path]:
    """Return the folders of runs that no process is working on."""
    return (folder for folder in _folders(root) if holder(folder) is None)


def known_attempts(root: Path) -> KnownAttempts:
    """Return the attempts of all runs under a root."""
    idle = list(idle_runs(root))
    busy = [folder for folder in _folders(root) if folder not in idle]
    return KnownAttempts(_attempts(idle), _attempts(busy))


def _folders(root: Path) -> list[Path]:
    return [folder for folder in visible_in(root / RUNS) if folder.is_dir()]


def _attempts(runs: Iterable[Path]) -> tuple[str, ...]:
    files = (file for run in runs for file in sorted((run / ATTEMPTS).glob(f"*/{attempt.ATTEMPT}")))
    return tuple(attempt.read(file.parent).run_id for file in files)


def _fault(record: Checkpoint) -> str:
    """What is wrong with the head's copy, judging by file sizes."""
    for name, digest in record.files.items():
        path = record.path / name
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"{path}: {error.strerror}"
        if size != digest.size:
            return f"{path} has {quantity(size, 'byte')}, but {digest.size:,} were recorded"
    return ""


_DEADLINE_SECONDS = 600.0


def garbage_on(
    nodes: Nodes, finished: Sequence[FinishedRun], attempts: KnownAttempts
) -> dict[str, list[Garbage] | HostError]:
    """Return the files that no run needs on each host, or the error of a host that does not answer."""
    answers = nodes.ask(FindGarbage(nodes.scratch, _known(finished, attempts)), _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else list(each.found) for host, each in answers.items()}


def free_on(
    nodes: Nodes,
    finished: Sequence[FinishedRun],
    attempts: KnownAttempts,
    found: Mapping[str, Sequence[Garbage]],
) -> dict[str, list[str] | HostError]:
    """Remove what was found, unless a run needs it by now; returns the removed paths, or the error, by host.

    The ``finished`` runs must come from ``verified``.
    """
    known = _known(finished, attempts)

    def request(host: str) -> FreeGarbage:
        relative_paths = tuple(each.relative_path for each in found.get(host, []) if not each.is_kept)
        return FreeGarbage(nodes.scratch, known, relative_paths)

    answers = nodes.ask_each({host: request(host) for host in nodes.hosts}, _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else list(each.relative_paths) for host, each in answers.items()}


def _known(finished: Sequence[FinishedRun], attempts: KnownAttempts) -> HeadRuns:
    return HeadRuns({run.name: Finished(run.unique_id, run.fault) for run in finished}, attempts)


def garbage_of_heads(attempts: KnownAttempts) -> Iterator[Garbage]:
    """Yield what heads on this machine left of attempts over hosts. Paths are absolute."""
    for folder, why in left_attempts(heads_folder(), attempts):
        yield Garbage(str(folder), size_of(folder), why)


def free_of_heads(attempts: KnownAttempts, found: Sequence[Garbage]) -> list[str]:
    """Remove what was found, unless it is needed by now; returns the removed paths."""
    asked = {each.relative_path for each in found}
    freed = [each.relative_path for each in garbage_of_heads(attempts) if each.relative_path in asked]
    for relative_path in freed:
        discard(Path(relative_path))
    return freed


def garbage_under(root: Path) -> Iterator[Garbage]:
    """Yield incomplete checkpoints and copies of models under a root that no run needs, and what deleted runs left.

    Kept folders are included.
    """
    for run in idle_runs(root):
        yield from _garbage_in(root, run)
    for hidden in _deleted(root, discarded):
        yield Garbage(str(hidden.relative_to(root)), size_of(hidden), "left by an interrupted removal")
    for hidden in _deleted(root, removing):
        run_name = hidden.name.removeprefix(".").rpartition(".")[0]
        why = f"kept: the removal was interrupted; finish it with `t5-pretrain rm {run_name} --root {quote(str(root))}`"
        yield Garbage(str(hidden.relative_to(root)), size_of(hidden), why, is_kept=True)
    for copy in _unused_starts(root):
        yield Garbage(str(copy.relative_to(root)), size_of(copy), "a copy of a model that no run starts from")


def free_under(root: Path, found: Sequence[Garbage]) -> list[str]:
    """Remove what was found, unless a run needs it by now; returns the removed paths."""
    asked, freed = {each.relative_path for each in found}, list[str]()
    for run in idle_runs(root):
        try:
            with run_lock(run, wait_seconds=0):
                freed += _free_in(root, run, asked)
        except RunLocked as error:
            _log.warning("%s", error)
    for hidden in _deleted(root, discarded):
        if (relative_path := str(hidden.relative_to(root))) in asked:
            remove_folder(hidden)
            freed.append(relative_path)
    for copy in _unused_starts(root):
        if (relative_path := str(copy.relative_to(root))) in asked:
            start_copy.remove(copy)
            freed.append(relative_path)
    return freed


def _unused_starts(root: Path) -> list[Path]:
    """Return copies of models that no run under the root starts from, and what interrupted removals left of them.

    None as long as a run has not begun to train, as only then its settings are recorded.
    """
    runs = _folders(root)
    if not all(is_there(run / RUN) for run in runs):
        return []
    try:
        specs = [load_run_spec(run) for run in runs]
    except T5TrainError as error:
        _log.warning("keeping all copies of models that runs start from: %s", error)
        return []
    named = (path for spec in specs for path in (spec.model.start_from, spec.tokenizer.path))
    used = {Path(path).name for path in named if path is not None}
    copies = [each for each in visible_in(root / STARTS) if is_there(each / START_NOTE) and each.name not in used]
    return [*copies, *sorted((root / STARTS).glob(".*.discarded"))]


def _deleted(root: Path, renamed: Callable[[Path], Path]) -> list[Path]:
    """The hidden folders of deleted runs under this name, except those that a process is just deleting."""
    found = sorted((root / RUNS).glob(renamed(Path("*")).name))
    return [folder for folder in found if folder.is_dir() and holder(folder) is None]


def _free_in(root: Path, run: Path, asked: Collection[str]) -> list[str]:
    freed = [each.relative_path for each in _garbage_in(root, run) if each.relative_path in asked and not each.is_kept]
    for relative_path in freed:
        discard(root / relative_path)
    return freed


def _garbage_in(root: Path, run: Path) -> Iterator[Garbage]:
    checkpoints = run / CHECKPOINTS
    tags = {HEAD: inventory_of(checkpoints)}
    half_removed = sorted(path.name for path in checkpoints.glob(".*.discarded"))
    names = [*prunable(tags, keep_last=len(tags[HEAD]) or 1), *half_removed]
    for folder in (checkpoints / name for name in names):
        yield Garbage(str(folder.relative_to(root)), size_of(folder), "an incomplete checkpoint")
    if names_in(aside := run / SET_ASIDE):
        yield Garbage(str(aside.relative_to(root)), size_of(aside), KEPT_ASIDE, is_kept=True)
