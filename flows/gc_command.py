"""``gc``: what no run needs, on this machine and on hosts, and how much room it takes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from flows.options import (
    HostfileOption,
    IncludeOption,
    RootOption,
    SetOption,
    ShipCodeOption,
    host_settings,
    root_of,
    settings,
)
from flows.resolve import resolve
from flows.terminal import complain, say, show_table
from infra.cluster.hosts import read_hosts
from infra.cluster.remote import Ssh
from infra.cluster.shipping import ship, shipped_code
from infra.node_store.collection import finished_runs, free_on, free_under, garbage_on, garbage_under
from infra.node_store.garbage import Garbage
from infra.node_store.nodes import Nodes
from t5train.errors import HostError
from t5train.spec import RunSpec

_COLUMNS = ["host", "what", "size", "why"]
_HEAD = "this machine"

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(gc)


def gc(
    changes: SetOption = None,
    root: RootOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    ship_code: ShipCodeOption = None,
    free: Annotated[bool, typer.Option("--free", help="Remove it")] = False,
) -> None:
    """Show what no run needs, under the root and on the hosts of a hostfile, and remove it with --free."""
    changed = settings(changes) | host_settings(hostfile, include, None, None, None, ship_code=ship_code)
    spec = resolve("smoke", changed, root=root)
    finished, own = finished_runs(root_of(root)), list(garbage_under(root_of(root)))
    with _nodes(spec) as (nodes, lacking):
        answers = lacking | garbage_on(nodes, finished)
        found = {_HEAD: own} | _heard(answers)
        show_table(_COLUMNS, [row for host, each in found.items() for row in _rows(host, each)])
        if free:
            freed = {_HEAD: free_under(root_of(root), own)} | _heard(free_on(nodes, finished, found))
            say(f"{sum(map(len, freed.values()))} removed")
        else:
            say(_summary(sum(each.size for share in found.values() for each in share)))
    if len(found) <= len(answers):
        raise typer.Exit(1)


@contextmanager
def _nodes(spec: RunSpec) -> Iterator[tuple[Nodes, dict[str, HostError]]]:
    """The hosts of the hostfile, none without one; and why others of it did not get the code that they are to run."""
    hosts = read_hosts(spec.cluster).names if spec.cluster.hostfile else ()
    with tempfile.TemporaryDirectory(prefix="t5-gc-") as folder:
        transport, code = Ssh.configured(spec.cluster, Path(folder)), shipped_code(spec.cluster)
        lacking = ship(transport, hosts) if code else {}
        yield (
            Nodes(transport, tuple(host for host in hosts if host not in lacking), spec.storage.scratch, code),
            lacking,
        )


def _heard(answers: dict[str, T | HostError]) -> dict[str, T]:
    """Those of hosts that answered; of others, a line why not."""
    for answer in answers.values():
        if isinstance(answer, HostError):
            complain(f"left out: {answer}")
    return {host: answer for host, answer in answers.items() if not isinstance(answer, HostError)}


def _rows(host: str, found: list[Garbage]) -> list[list[str]]:
    return [[host, each.place, _readable(each.size), each.why] for each in found]


def _summary(size_bytes: int) -> str:
    if not size_bytes:
        return "there is nothing that no run needs"
    return f"{_readable(size_bytes)} that no run needs: `t5-pretrain gc --free` removes it"


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
