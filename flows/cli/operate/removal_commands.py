"""``gc``: shows and removes files that no run needs; ``rm``: deletes a run. Both on this machine and on hosts."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

import typer

from flows.cli.interruption import typed_command
from flows.cli.options import (
    HostfileOption,
    HostOptions,
    JsonOption,
    RootOption,
    SetOption,
    existing_root,
    root_of,
    runs_like,
    settings,
    with_options,
)
from flows.cli.terminal import complain, say, show_json, show_table, stage_display
from infra.head.hosts.code_shipping import reached_nodes
from infra.head.hosts.hostfile import chosen_hosts, spare_hosts
from infra.head.runs.run_lookup import root_of_run
from infra.head.runs.run_removal import (
    RemovalPlan,
    hosts_of_run,
    machines_of_run,
    plan_removal,
    removable_run,
    remove_run,
)
from infra.head.runs.run_state import read_json
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
from infra.node.storage.garbage import Garbage, size_of
from t5train.errors import HostError, SpecError
from t5train.files.run_folder import PUBLISHED, RUNS, discarded
from t5train.quantities import format_bytes
from t5train.spec import MachinesSpec

_COLUMNS = ["host", "what", "size", "why"]
_HEAD = "this machine"

T = TypeVar("T")


@with_options
def gc(
    hosts: HostOptions,
    changes: SetOption = None,
    root: RootOption = None,
    free: Annotated[bool, typer.Option("--free", help="Remove these files")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show files that no run needs, under the root and on the hosts of a hostfile, and remove them with --free.

    $ t5-pretrain gc
    $ t5-pretrain gc --free
    $ t5-pretrain gc --hostfile hosts --root /data/t5
    """
    machines, folder = MachinesSpec.of(settings(changes) | hosts.settings()), existing_root(root)
    finished, attempts = finished_runs(folder), known_attempts(folder)
    own, of_heads = list(garbage_under(folder)), list(garbage_of_heads(attempts))
    with reached_nodes(machines, _hosts(machines)) as (nodes, lacking):
        answers = lacking | garbage_on(nodes, finished, attempts)
        found = {_HEAD: [*own, *of_heads]} | _answered(answers)
        listed = [(host, each) for host, share in found.items() for each in share]
        rows = [[host, each.relative_path, format_bytes(each.size), each.why] for host, each in listed]
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
    to_remove = [each.relative_path for share in found.values() for each in share if not each.is_kept]
    names = {PurePath(path).name for path in to_remove if path.startswith(f"{RUNS}/")}
    with stage_display() as progress:
        checked = list(verified(finished, names, progress))
    for before, run in zip(finished, checked, strict=True):
        if run.fault and not before.fault:
            complain(f"kept on all hosts: {run.name}, because the head's copy is not complete: {run.fault}")
    return checked


def _hosts(machines: MachinesSpec) -> tuple[str, ...]:
    cluster = machines.cluster
    return (*chosen_hosts(cluster).names, *spare_hosts(cluster).names) if cluster.hostfile else ()


def _answered(answers: dict[str, T | HostError]) -> dict[str, T]:
    """Return the answers without those that are errors, which are printed."""
    for answer in answers.values():
        if isinstance(answer, HostError):
            complain(f"left out: {answer}")
    return {host: answer for host, answer in answers.items() if not isinstance(answer, HostError)}


def _facts(found: Mapping[str, Iterable[Garbage]], freed: Mapping[str, Iterable[str]] | None) -> dict[str, Any]:
    """Return the result as JSON values, see docs/reference/json.md; ``freed`` is None if nothing was to be removed."""
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


def rm(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Run to delete: its name, or the path of its folder", autocompletion=runs_like
        ),
    ],
    root: RootOption = None,
    hostfile: HostfileOption = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="NAME[@...]", help="Hosts of the run that are gone for good and not asked"),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Delete the folder that the run was published to, too")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
) -> None:
    """Delete a run, and its copies on hosts, after showing what would be deleted and asking.

    It refuses while the run is in use, if another run starts from it, and if a host of the run does not answer. Text,
    tokenizers and token shards stay, as other runs may use them.

    $ t5-pretrain rm mine
    $ t5-pretrain rm mine --hostfile hosts --yes
    """
    named, folder = removable_run(root_of(root), run)
    machines = machines_of_run(folder, hostfile)
    without = exclude.split("@") if exclude else []
    hosts = hosts_of_run(folder, machines, without) if folder != discarded(named) else []
    with reached_nodes(machines, hosts) as (nodes, lacking):
        plan = plan_removal(named, folder, nodes, lacking, with_published=published)
        _show(plan)
        if plan.is_interrupted:
            complain(f"finishing the removal of {named.name} that was interrupted")
        elif not yes:
            _ask(plan)
        remove_run(plan, nodes)
    say(f"deleted: {named}")
    if plan.published is not None:
        say(f"deleted: {plan.published}")


def _show(plan: RemovalPlan) -> None:
    rows = [[_HEAD, str(plan.folder), format_bytes(plan.size_bytes), "the run"]]
    rows += [[_HEAD, each.relative_path, format_bytes(each.size), each.why] for each in plan.of_head]
    if plan.published is not None:
        rows.append([_HEAD, str(plan.published), format_bytes(size_of(plan.published)), "published"])
    for host, found in plan.on_hosts.items():
        rows += [[host, each.relative_path, format_bytes(each.size), _why(each.why, each.is_kept)] for each in found]
    show_table(_COLUMNS, rows)
    url = read_json(plan.folder / PUBLISHED).get("url")
    if url is not None and plan.published is None:
        say(f"stays: {url}, where the run is published")
    say(f"stays: text, tokenizers and token shards under {root_of_run(plan.run)}, which other runs may use")


def _why(why: str, is_kept: bool) -> str:
    return why if is_kept else "the run's copy" if why.startswith("the head has") else why


def _ask(plan: RemovalPlan) -> None:
    """Ask whether to delete. Raises SpecError if there is nobody to ask."""
    freed = [plan.size_bytes, *(each.size for each in plan.of_head)]
    freed += [each.size for found in plan.on_hosts.values() for each in found if not each.is_kept]
    freed += [size_of(plan.published)] if plan.published is not None else []
    if not sys.stdin.isatty():
        raise SpecError(
            f"run {plan.run.name} was not deleted, because there is no terminal to ask in. Add --yes to delete its "
            f"{sum(freed):,} bytes without being asked"
        )
    if not typer.confirm(f"Delete {format_bytes(sum(freed))} ({sum(freed):,} bytes)?", err=True):
        complain("nothing was deleted")
        raise typer.Exit(1)
