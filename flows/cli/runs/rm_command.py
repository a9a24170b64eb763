"""``rm``: deletes a run, with its copies on hosts."""

import sys
from typing import Annotated

import typer

from flows.cli.options import HostfileOption, RootOption, root_of, runs_like
from flows.cli.terminal import complain, say, show_table
from infra.head.hosts.reached_nodes import reached_nodes
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
from infra.node.storage.garbage import size_of
from t5train.errors import SpecError
from t5train.files.run_folder import PUBLISHED, discarded
from t5train.quantities import format_bytes

_COLUMNS = ["host", "what", "size", "why"]
_HEAD = "this machine"


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
    tokenizers and token shards stay, as other runs may use them. Example: `t5-pretrain rm smoke-1a2b3c4d`.
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
