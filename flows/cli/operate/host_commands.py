"""``preflight``: checks whether hosts can train together, and can install what they need before.

``wheelhouse`` collects the wheels to install on hosts without internet access.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import SmokeOptions, TrainingHostOptions, with_options
from flows.cli.terminal import complain, say, show_table, stage_display
from infra.head.environments.environment_installation import install_on, python_of, require_environment_path
from infra.head.environments.wheel_collection import Target, collect_project
from infra.head.environments.wheelhouse import read_wheelhouse
from infra.head.host_selection import asked
from infra.head.hosts.hostfile import read_hosts, spare_hosts
from infra.head.hosts.ssh import Transport
from infra.head.preflight.checklist import COLUMNS
from infra.head.preflight.host_preflight import preflight as ask_hosts
from infra.head.preflight.pair_checks import require_data
from infra.head.preflight.remote_starts import with_start_here
from infra.head.preflight.run_checks import require_possible
from t5train.errors import HostError, SpecError
from t5train.quantities import format_bytes, quantity

_OUTCOMES = ["host", "result", "what"]


@with_options
def preflight(
    choice: SmokeOptions,
    hosts: TrainingHostOptions,
    install: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Wheelhouse to install on every host before the checks",
            show_default=False,
            readable=False,
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder of the new environment on every host",
            show_default="that of this command",
            readable=False,
        ),
    ] = None,
) -> None:
    """Check the hosts of a hostfile for problems, and test the rendezvous of all ranks; exit code 1 with problems.

    With --install, first make a new environment on every host from a wheelhouse (see `wheelhouse`), without internet
    access there. An environment that exists is never changed.

    $ t5-pretrain preflight --config run.yaml --hostfile hosts
    $ t5-pretrain preflight --config run.yaml --exclude node7
    $ t5-pretrain preflight --config run.yaml --install wheels --into /opt/t5
    """
    if into is not None and install is None:
        raise SpecError("--into is given without --install: name the wheelhouse that is to be installed there")
    spec = with_start_here(choice.chosen(hosts.settings()).spec())
    of_model = require_possible(spec)
    with asked(spec, read_hosts(spec.cluster), of_model, require_data(spec)) as (needs, transport):
        checked = needs
        if install is not None:
            place = require_environment_path(into or Path(sys.prefix))
            _install(transport, [*needs.slots, *spare_hosts(spec.cluster).names], install.absolute(), place)
            checked = replace(needs, python=[python_of(place)])
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


def wheelhouse(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the wheels", readable=False)],
    python: Annotated[
        str | None, typer.Option("--python", help="Python of the hosts, such as 3.12", show_default="this one")
    ] = None,
    platforms: Annotated[
        list[str] | None,
        typer.Option(
            "--platform",
            metavar="PLATFORM",
            help="Kind of machine, such as manylinux_2_28_x86_64; can be repeated",
            show_default="that of this machine",
        ),
    ] = None,
    extras: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="Optional part, such as flows, s3 or hub", show_default=False),
    ] = None,
) -> None:
    """Collect the wheels of this project and of all that training needs, for hosts without internet access.

    pip's configuration decides where packages come from, and so which build of torch. Packages that exist only as
    source are built here. A second call keeps what verifies of a completed one. Install the wheels with
    `preflight --install`.

    $ t5-pretrain wheelhouse wheels
    $ t5-pretrain wheelhouse wheels --python 3.12 --platform manylinux_2_28_x86_64
    $ t5-pretrain wheelhouse wheels --extra flows --extra s3
    """
    began = time.monotonic()
    with stage_display() as progress:
        collected = collect_project(folder.absolute(), Target.of(python, platforms), extras or [], progress)
    made, seconds = collected.wheelhouse, time.monotonic() - began
    say(
        f"{folder}: {quantity(len(made.wheels), 'wheel')}, {format_bytes(made.size_bytes)}, for Python {made.python} "
        f"on {', '.join(made.platforms)}; {collected.reused} were there; {seconds:.0f} s"
    )
