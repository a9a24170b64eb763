"""``run`` and ``recipes``."""

import logging
import shlex
from typing import Annotated

import typer

from flows import prefect_server
from flows.cli.dry_run import describe
from flows.cli.options import (
    AdoptOption,
    BeginAgainOption,
    ExcludeOption,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    NameOption,
    NumNodesOption,
    RecipeArgument,
    RootOption,
    SetOption,
    ShipCodeOption,
    SparesOption,
    host_settings,
    settings,
)
from flows.cli.terminal import BarProgress, complain, progress_display, say
from flows.spec_from_recipe import resolve
from infra.head.launch.held_run import HeldRun
from infra.head.preflight.run_checks import require_possible
from infra.head.training_run import hold_ready_run, train_again
from t5train.checkpoint.resume_point import require_no_pending_begin_again
from t5train.files.run_folder import WITNESS_FOLDER
from t5train.metrics import loss_lines
from t5train.progress import Progress, silent
from t5train.records.stage_records import Publication
from t5train.records.witness import Witness
from t5train.spec import RunSpec
from t5train.spec.recipes import RECIPES


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(run)
    app.command()(recipes)


def recipes() -> None:
    """List the recipes."""
    for name, recipe in RECIPES.items():
        say(f"{name}\t{(recipe.__doc__ or '').splitlines()[0]}")


def run(  # noqa: PLR0913, PLR0917 - one for each option
    recipe: RecipeArgument,
    changes: SetOption = None,
    root: RootOption = None,
    name: NameOption = None,
    publish_to: Annotated[
        str | None,
        typer.Option(help="Folder or fsspec URL to publish to", metavar="URL", show_default="a folder under the root"),
    ] = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    num_nodes: NumNodesOption = None,
    launcher: LauncherOption = None,
    spares: SparesOption = None,
    ship_code: ShipCodeOption = None,
    begin_again: BeginAgainOption = False,
    adopt: AdoptOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, without running it")] = False,
) -> None:
    """Run all stages, from text to a published, certified checkpoint. Finished stages are reused."""
    changed = settings(changes) | host_settings(hostfile, include, exclude, num_nodes, launcher, spares, ship_code)
    spec = resolve(recipe, changed, root=root, run_name=name, publish_to=publish_to)
    if dry_run:
        say(describe(spec))
        return
    if not begin_again:
        require_no_pending_begin_again(spec.run_folder)
    require_possible(spec)
    with (
        hold_ready_run(spec) as held,  # before the server starts, so that a second start is refused at once
        progress_display() as progress,
        prefect_server.any_server(spec.storage.root, progress) as api_url,
    ):
        if begin_again:
            train_again(spec, held)
        complain(f"watch it at {api_url.removesuffix('/api')}{_login(api_url)}")
        _close_abandoned_runs()
        publication = _run_flow(held, spec, recipe, changed, progress, adopt)
    for line in loss_lines(Witness.load(spec.run_folder / WITNESS_FOLDER).validation):
        say(line)
    say(f"published: {publication.url}")


def _login(api_url: str) -> str:
    key = prefect_server.key_file(api_url)
    return f" (to log in: cat {shlex.quote(str(key))})" if key is not None else ""


def _close_abandoned_runs() -> None:
    from flows.abandoned import close_abandoned_runs  # imports Prefect, as below

    for name in close_abandoned_runs():
        complain(f"run {name!r} was killed and is now closed in Prefect; start the same run again to resume it")


def _run_flow(
    held: HeldRun, spec: RunSpec, recipe: str, changes: dict[str, str], progress: Progress, adopt: bool
) -> Publication:
    from flows.pretrain import pretrain_flow  # imports Prefect, which reads its settings when it is imported

    if isinstance(progress, BarProgress):
        _log_above(progress)
    # Without a terminal, progress appears in the run's log.
    pretrain = pretrain_flow(held, progress if isinstance(progress, BarProgress) else silent)
    return pretrain(
        recipe=recipe,
        root=spec.storage.root,
        settings=changes,
        run_name=spec.name,
        publish_to=spec.storage.publish_to,
        adopt=adopt,
    )


def _log_above(progress: BarProgress) -> None:
    """Print Prefect's log lines above the bar; its handlers would otherwise write across it."""
    from prefect.logging.handlers import PrefectConsoleHandler

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.console = progress.console
