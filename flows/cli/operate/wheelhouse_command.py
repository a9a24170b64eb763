"""``wheelhouse``: collects the wheels for hosts without internet access."""

import time
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.terminal import say, stage_display
from infra.head.environments.wheel_collection import Target, collect_project
from t5train.quantities import format_bytes, quantity


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
    source are built here. A second call keeps what verifies. Install the wheels with `preflight --install`.
    """
    began = time.monotonic()
    with stage_display() as progress:
        collected = collect_project(folder.absolute(), Target.of(python, platforms), extras or [], progress)
    made, seconds = collected.wheelhouse, time.monotonic() - began
    say(
        f"{folder}: {quantity(len(made.wheels), 'wheel')}, {format_bytes(made.size_bytes)}, for Python {made.python} "
        f"on {', '.join(made.platforms)}; {collected.reused} were there; {seconds:.0f} s"
    )
