"""``run``, and ``init`` and ``recipes``, which show what can be run."""

import asyncio
import json
import logging
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from flows.cli.dry_run import show_dry_run
from flows.cli.interruption import explaining_interruption
from flows.cli.options import (
    AdoptOption,
    BeginAgainOption,
    Chosen,
    JsonOption,
    NameOption,
    RecipeArgument,
    SetOption,
    TextOptions,
    TrainingHostOptions,
    root_of,
    settings,
    with_options,
)
from flows.cli.terminal import BarProgress, complain, progress_display, say, show_json, show_rows
from flows.run_parameters import RunParameters
from flows.server import prefect_server
from flows.server.prefect_settings import reading_settings
from flows.spec_from_recipe import has_own_text
from infra.head.launch.held_run import HeldRun
from infra.head.storage.continued_run import StoredRun, config_file, require_own_settings, stored_run, take_identity
from infra.head.training_run import hold_ready_run, train_again
from t5train.checkpoint.resume_point import require_no_pending_begin_again
from t5train.files.run_folder import WITNESS_FOLDER
from t5train.progress import Progress, silent
from t5train.records.metrics import loss_lines
from t5train.records.stage_records import Publication
from t5train.records.witness import Witness
from t5train.spec.config_file import recipe_text
from t5train.spec.recipes import RECIPES, TRIAL_STEPS, summary
from t5train.spec.recipes import recipe as recipe_spec


def recipes(as_json: JsonOption = False) -> None:
    """List the recipes.

    $ t5-pretrain recipes
    $ t5-pretrain recipes --json
    """
    if as_json:
        show_json({"recipes": [{"name": name, "summary": summary(name)} for name in RECIPES]})
        return
    show_rows([[name, summary(name)] for name in RECIPES])


@with_options
def run(  # noqa: PLR0913, PLR0917 - one for each option that only this command has
    options: TextOptions,
    hosts: TrainingHostOptions,
    name: NameOption = None,
    publish_to: Annotated[
        str | None,
        typer.Option(help="Folder or fsspec URL to publish to", metavar="URL", show_default="a folder under the root"),
    ] = None,
    begin_again: BeginAgainOption = False,
    adopt: AdoptOption = False,
    stored: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Continue a run whose machines are lost, from its checkpoints in S3: s3://BUCKET/FOLDER/NAME",
            metavar="URL",
            show_default=False,
        ),
    ] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Train a tiny model with the recipe's layout on this machine's CPUs")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, without running it")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON, for programs")] = False,
) -> None:
    """Run all stages, from text to a published, certified checkpoint. Finished stages are reused.

    $ t5-pretrain run smoke
    $ t5-pretrain run base --corpus '/data/*.txt' --name mine
    $ t5-pretrain run --config run.yaml --dry-run
    $ t5-pretrain run moe --trial
    """
    more = hosts.settings() | ({} if publish_to is None else {"storage.publish_to": json.dumps(publish_to)})
    if trial and options.config is not None:
        raise typer.BadParameter("it replaces most settings of a file: use `run RECIPE --trial`", param_hint="--trial")
    if stored is None:
        lost, choice = None, options.chosen(more, name)
    else:
        if options.recipe or options.config or name or trial or begin_again:
            raise typer.BadParameter(
                "the run's own settings are used: leave RECIPE, --config, --name, --trial and --begin-again out",
                param_hint="--from",
            )
        lost = stored_run(stored)
        choice = _chosen_from(lost, options, more)
    parameters = RunParameters(
        recipe=choice.recipe,
        root=root_of(choice.root),
        run_name=choice.name,
        trial=trial,
        settings=choice.settings,
    )
    if as_json and not dry_run:
        raise typer.BadParameter("it needs --dry-run", param_hint="--json")
    if dry_run:
        show_dry_run(parameters, as_json, begin_again, lost)
        return
    spec = parameters.spec_for_this_machine()
    if lost is not None:
        require_own_settings(spec, lost)
        take_identity(spec, lost)
    if not begin_again:
        require_no_pending_begin_again(spec.run_folder)
    with (
        hold_ready_run(spec) as held,  # before the server starts, so that a second start is refused at once
        explaining_interruption(spec.run_folder, spec.optimizer.num_steps),
        progress_display() as progress,
        prefect_server.any_server(spec.storage.root, progress) as api_url,
    ):
        if begin_again:
            train_again(spec, held)
        complain(f"{_server_stage()}: watch the run at {api_url.removesuffix('/api')}{_login(api_url)}")
        asyncio.run(_close_killed_runs())
        publication = _run_flow(held, parameters, progress, adopt)
    losses = Witness.load(spec.run_folder / WITNESS_FOLDER).validation
    for line in loss_lines(losses, is_trial=spec.optimizer.num_steps <= TRIAL_STEPS):
        say(line)
    say(f"published: {publication.url}")


def _chosen_from(lost: StoredRun, options: TextOptions, more: dict[str, str]) -> Chosen:
    with TemporaryDirectory(prefix="t5-run-") as folder:
        of_run = replace(options, config=config_file(lost, Path(folder)))
        return of_run.chosen(more | {"storage.publish_checkpoints_under": json.dumps(lost.under)}, lost.name)


def _login(api_url: str) -> str:
    key = prefect_server.key_file(api_url)
    return f" (to log in: cat {shlex.quote(str(key))})" if key is not None else ""


def _server_stage() -> str:
    from tasks.stages import SERVER, numbered  # imports Prefect, as below

    return numbered(SERVER)


async def _close_killed_runs() -> None:
    # These import Prefect, as below.
    from prefect.client.orchestration import get_client

    from flows.workers.abandoned import close_killed_runs, closed_line

    async with get_client() as client:
        for run in await close_killed_runs(client):
            complain(closed_line(run, "was killed"))


def _run_flow(held: HeldRun, parameters: RunParameters, progress: Progress, adopt: bool) -> Publication:
    # These import Prefect, which reads its settings when it is imported.
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.pretrain import pretrain_flow

    _arrange_log(progress)
    # Without a terminal, progress appears in the run's log.
    pretrain = pretrain_flow(held, progress if isinstance(progress, BarProgress) else silent)
    with ExitStack() as stack:
        # An automation marks runs as Lost whose heartbeats end. If this one is alive, no worker would give its state
        # back. Prefect reads all settings again here, also those in the current folder.
        with reading_settings():
            stack.enter_context(temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
        publication: Publication = pretrain(**parameters.model_dump(exclude_none=True), adopt=adopt)
    return publication


def _arrange_log(progress: Progress) -> None:
    """Make Prefect's log lines on this terminal brief about failures, and print them above the bar if there is one."""
    from prefect.logging.handlers import PrefectConsoleHandler

    from tasks.prefect_log import show_failures_briefly

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            show_failures_briefly(handler)
            if isinstance(progress, BarProgress):
                handler.console = progress.console  # it would otherwise write across the bar


def init(recipe: RecipeArgument, changes: SetOption = None) -> None:
    """Print a configuration file for `run --config` with every setting of a recipe, its value and a comment.

    $ t5-pretrain init base > run.yaml
    $ t5-pretrain init smoke --set optimizer.num_steps=60 > run.yaml
    """
    changed = settings(changes)
    spec = recipe_spec(recipe, changed)
    say(recipe_text(spec, needs_source=not has_own_text(recipe, changed)).removesuffix("\n"))
