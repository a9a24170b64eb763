"""``preflight``: checks whether hosts can train together, and can install what they need before."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import (
    ConfigOption,
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    NumNodesOption,
    RecipeOrSmoke,
    RootOption,
    SetOption,
    ShipCodeOption,
    SparesOption,
    chosen,
    host_settings,
    settings,
)
from flows.cli.terminal import complain, say, show_table, stage_display
from infra.head.environments.environment_installation import install_on, python_of, require_environment_path
from infra.head.environments.wheelhouse import read_wheelhouse
from infra.head.host_selection import asked
from infra.head.hosts.hostfile import read_hosts, spare_hosts
from infra.head.hosts.ssh import Transport
from infra.head.preflight.checklist import COLUMNS
from infra.head.preflight.host_preflight import preflight as ask_hosts
from infra.head.preflight.run_checks import require_possible
from infra.head.preflight.text_checks import require_text
from t5train.errors import HostError, SpecError

InstallOption = Annotated[
    Path | None,
    typer.Option(
        "--install",
        metavar="DIR",
        help="Wheelhouse to install on every host before the checks",
        show_default=False,
        readable=False,
    ),
]
IntoOption = Annotated[
    Path | None,
    typer.Option(
        "--into",
        metavar="PATH",
        help="Folder of the new environment on every host",
        show_default="that of this command",
        readable=False,
    ),
]
_OUTCOMES = ["host", "result", "what"]


def preflight(  # noqa: PLR0913, PLR0917 - one for each option
    recipe: RecipeOrSmoke = None,
    config: ConfigOption = None,
    changes: SetOption = None,
    root: RootOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    num_nodes: NumNodesOption = None,
    launcher: LauncherOption = None,
    spares: SparesOption = None,
    ship_code: ShipCodeOption = None,
    install: InstallOption = None,
    into: IntoOption = None,
) -> None:
    """Check the hosts of a hostfile for problems, and test the rendezvous of all ranks; exit code 1 with problems.

    With --install, first make a new environment on every host from a wheelhouse (see `wheelhouse`), without internet
    access there. An environment that exists is never changed.
    """
    if into is not None and install is None:
        raise SpecError("--into is given without --install: name the wheelhouse that is to be installed there")
    changed = settings(changes) | host_settings(hostfile, include, exclude, num_nodes, launcher, spares, ship_code)
    spec = chosen(recipe, config, changed, root=root, default="smoke").spec()
    of_model = require_possible(spec)
    with asked(spec, read_hosts(spec.cluster), of_model, require_text(spec)) as (needs, transport):
        checked = needs
        if install is not None:
            place = require_environment_path(into or Path(sys.prefix))
            _install(transport, [*needs.slots, *spare_hosts(spec.cluster).names], install.absolute(), place)
            checked = replace(needs, python=python_of(place))
        report = ask_hosts(checked, transport)
    show_table(COLUMNS, report.rows())
    if report.problems:
        complain(f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}")
        raise typer.Exit(1)


def _install(transport: Transport, hosts: list[str], folder: Path, into: Path) -> None:
    """Install the wheelhouse on the hosts and print the outcomes. Ends the command with code 7 if a host fails."""
    wheelhouse = read_wheelhouse(folder)
    with stage_display() as progress:
        outcomes = install_on(transport, hosts, folder, wheelhouse, into, progress)
    failed = [outcome for outcome in outcomes.values() if isinstance(outcome, HostError)]
    rows = []
    for host, outcome in outcomes.items():
        if isinstance(outcome, HostError):
            rows.append([host, "FAILED", str(outcome).removeprefix(f"{host}: ")])
        else:
            rows.append([host, "installed" if outcome.is_new else "already there", str(into)])
    show_table(_OUTCOMES, rows)
    if failed:
        complain(f"hosts without an environment in {into}: {len(failed)} of {len(hosts)}; the checks were not started")
        raise typer.Exit(HostError.exit_code)
    if into != Path(sys.prefix):
        say(
            f"the checks below use {into}. Runs use the path of the environment that starts them, now {sys.prefix}: to "
            f"use {into}, install it on this machine, too, and start them with {into}/bin/t5-pretrain"
        )
