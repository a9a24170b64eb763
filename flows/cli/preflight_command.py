"""``preflight``: checks whether hosts can train together, without training."""

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
from flows.cli.terminal import complain, show_table
from infra.head.host_selection import asked
from infra.head.hosts.hostfile import read_hosts
from infra.head.preflight.host_preflight import COLUMNS
from infra.head.preflight.host_preflight import preflight as ask_hosts
from infra.head.preflight.run_checks import require_possible
from infra.head.preflight.text_checks import require_text


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(preflight)


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
) -> None:
    """Check the hosts of a hostfile for problems, and test the rendezvous of all ranks; exit code 1 with problems."""
    changed = settings(changes) | host_settings(hostfile, include, exclude, num_nodes, launcher, spares, ship_code)
    spec = chosen(recipe, config, changed, root=root, default="smoke").spec()
    of_model = require_possible(spec)
    with asked(spec, read_hosts(spec.cluster), of_model, require_text(spec).size_bytes) as (needs, transport):
        report = ask_hosts(needs, transport)
    show_table(COLUMNS, report.rows())
    if report.problems:
        complain(f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}")
        raise typer.Exit(1)
