"""``gc``: shows and removes files that no run needs, on this machine and on hosts."""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

import typer

from flows.cli.interruption import typed_command
from flows.cli.options import (
    HostfileOption,
    IncludeOption,
    JsonOption,
    RootOption,
    SetOption,
    ShipCodeOption,
    existing_root,
    host_settings,
    settings,
)
from flows.cli.terminal import complain, say, show_json, show_table, stage_display
from infra.head.hosts.hostfile import chosen_hosts, spare_hosts
from infra.head.hosts.reached_nodes import reached_nodes
from infra.head.storage.garbage_collection import (
    FinishedRun,
    finished_runs,
    free_of_heads,
    free_on,
    free_under,
    garbage_of_heads,
    garbage_on,
    garbage_under,
    known_attempts,
    verified,
)
from infra.node.storage.garbage import Garbage
from t5train.errors import HostError
from t5train.files.run_folder import RUNS
from t5train.host_resources import format_bytes
from t5train.spec import MachinesSpec

_COLUMNS = ["host", "what", "size", "why"]
_HEAD = "this machine"

T = TypeVar("T")


def gc(
    changes: SetOption = None,
    root: RootOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    ship_code: ShipCodeOption = None,
    free: Annotated[bool, typer.Option("--free", help="Remove these files")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show files that no run needs, under the root and on the hosts of a hostfile, and remove them with --free."""
    changed = settings(changes) | host_settings(hostfile, include, None, None, None, ship_code=ship_code)
    machines, folder = MachinesSpec.of(changed), existing_root(root)
    finished, attempts = finished_runs(folder), known_attempts(folder)
    own, of_heads = list(garbage_under(folder)), list(garbage_of_heads(attempts))
    with reached_nodes(machines, _hosts(machines)) as (nodes, lacking):
        answers = lacking | garbage_on(nodes, finished, attempts)
        found = {_HEAD: [*own, *of_heads]} | _answered(answers)
        rows = [row for host, each in found.items() for row in _rows(host, each)]
        if rows and not as_json:
            show_table(_COLUMNS, rows)
        freed = None
        if free:
            checked = _verified(finished, found)
            still = {run.name for run in finished_runs(folder)}  # verification may have taken hours
            verified_runs = [run for run in checked if run.name in still]
            freed = {_HEAD: free_under(folder, own) + free_of_heads(attempts, of_heads)}
            freed |= _answered(free_on(nodes, verified_runs, attempts, found))
    if as_json:
        silent = [host for host, answer in answers.items() if isinstance(answer, HostError)]
        show_json(_facts(found, freed) | {"silent_hosts": silent})
    elif freed is not None:
        say(f"{sum(map(len, freed.values()))} removed")
    else:
        say(_summary(sum(each.size for share in found.values() for each in share if not each.is_kept)))
    if len(found) <= len(answers):
        raise typer.Exit(1)


def _verified(finished: list[FinishedRun], found: Mapping[str, Iterable[Garbage]]) -> list[FinishedRun]:
    """Return the finished runs after verifying the head's copies of those that hosts are to remove. Reports faults."""
    names = {PurePath(each.relative_path).name for share in found.values() for each in share if _is_run(each)}
    with stage_display() as progress:
        checked = list(verified(finished, names, progress))
    for before, run in zip(finished, checked, strict=True):
        if run.fault and not before.fault:
            complain(f"kept on all hosts: {run.name}, because the head's copy is not complete: {run.fault}")
    return checked


def _is_run(garbage: Garbage) -> bool:
    return not garbage.is_kept and garbage.relative_path.startswith(f"{RUNS}/")


def _hosts(machines: MachinesSpec) -> tuple[str, ...]:
    cluster = machines.cluster
    return (*chosen_hosts(cluster).names, *spare_hosts(cluster).names) if cluster.hostfile else ()


def _answered(answers: dict[str, T | HostError]) -> dict[str, T]:
    """Return the answers without those that are errors, which are printed."""
    for answer in answers.values():
        if isinstance(answer, HostError):
            complain(f"left out: {answer}")
    return {host: answer for host, answer in answers.items() if not isinstance(answer, HostError)}


def _rows(host: str, found: list[Garbage]) -> list[list[str]]:
    return [[host, each.relative_path, format_bytes(each.size), each.why] for each in found]


def _facts(found: Mapping[str, Iterable[Garbage]], freed: Mapping[str, Iterable[str]] | None) -> dict[str, Any]:
    """Return the result as JSON values (docs/reference/json.md). ``freed`` is None if nothing was to be removed."""
    listed = [
        {"host": host, "path": each.relative_path, "bytes": each.size, "why": each.why, "kept": each.is_kept}
        for host, share in found.items()
        for each in share
    ]
    removed = [{"host": host, "path": path} for host, paths in (freed or {}).items() for path in paths]
    return {"found": listed, "removed": removed}


def _summary(size_bytes: int) -> str:
    if not size_bytes:
        return "no unneeded files found"
    return f"{format_bytes(size_bytes)} of files that no run needs: remove them with `{typed_command('--free')}`"
