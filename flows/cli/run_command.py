"""``run`` and ``finetune``, and ``init`` and ``recipes``, which show what can be run."""

import asyncio
import json
import logging
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
    PairsOptions,
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
from flows.spec_from_recipe import has_own_data, require_recipe_for
from infra.head.launch.held_run import HeldRun
from infra.head.storage.continued_run import StoredRun, config_file, require_own_settings, stored_run, take_identity
from infra.head.training_run import hold_ready_run, train_again
from t5train.checkpoint.resume_point import require_no_pending_begin_again
from t5train.files.run_folder import EXPORT, METRICS, WITNESS_FOLDER
from t5train.progress import Progress, silent
from t5train.records.evaluation_metrics import recorded_metrics
from t5train.records.metrics import loss_lines, read
from t5train.records.stage_records import Publication
from t5train.records.witness import Witness
from t5train.report.result_reports import best_lines, earlier_lines, metrics_lines
from t5train.spec import RunSpec
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


@dataclass(frozen=True)
class RunOptions:
    """The options of the commands that execute a flow."""

    name: NameOption = None
    publish_to: Annotated[
        str | None,
        typer.Option(help="Folder or fsspec URL to publish to", metavar="URL", show_default="a folder under the root"),
    ] = None
    begin_again: BeginAgainOption = False
    adopt: AdoptOption = False
    stored: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Continue a run whose machines are lost, from its checkpoints in S3: s3://BUCKET/FOLDER/NAME",
            metavar="URL",
            show_default=False,
        ),
    ] = None
    trial: Annotated[
        bool, typer.Option("--trial", help="Train a tiny model with the recipe's layout on this machine's CPUs")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, without running it")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON, for programs")] = False


@with_options
def run(options: TextOptions, hosts: TrainingHostOptions, given: RunOptions) -> None:
    """Run all stages, from text to a published, certified checkpoint. Finished stages are reused.

    $ t5-pretrain run smoke
    $ t5-pretrain run base --corpus '/data/*.txt' --name mine
    $ t5-pretrain run --config run.yaml --dry-run
    $ t5-pretrain run moe --trial
    """
    _start(options, hosts, given, fine_tuning=False)


@with_options
def finetune(options: PairsOptions, hosts: TrainingHostOptions, given: RunOptions) -> None:
    """Run all stages, from pairs to a published, certified checkpoint. Finished stages are reused.

    $ t5-pretrain finetune reverse_and_sort
    $ t5-pretrain finetune finetune_base --train 'wmt.tsv#source=en&target=de'
    $ t5-pretrain finetune --config run.yaml --dry-run
    """
    _start(options, hosts, given, fine_tuning=True)


def _start(
    options: TextOptions | PairsOptions, hosts: TrainingHostOptions, given: RunOptions, *, fine_tuning: bool
) -> None:
    publish_to, begin_again, trial = given.publish_to, given.begin_again, given.trial
    more = hosts.settings() | ({} if publish_to is None else {"storage.publish_to": json.dumps(publish_to)})
    if trial and options.config is not None:
        command = "finetune" if fine_tuning else "run"
        raise typer.BadParameter(
            f"it replaces most settings of a file: use `{command} RECIPE --trial`", param_hint="--trial"
        )
    if given.stored is None:
        lost, choice = None, options.chosen(more, given.name)
    else:
        if options.recipe or options.config or given.name or trial or begin_again:
            raise typer.BadParameter(
                "the run's own settings are used: leave RECIPE, --config, --name, --trial and --begin-again out",
                param_hint="--from",
            )
        lost = stored_run(given.stored)
        choice = _chosen_from(lost, options, more)
    require_recipe_for(fine_tuning, choice.recipe)
    parameters = RunParameters(
        recipe=choice.recipe,
        root=root_of(choice.root),
        run_name=choice.name,
        trial=trial,
        settings=choice.settings,
    )
    if given.as_json and not given.dry_run:
        raise typer.BadParameter("it needs --dry-run", param_hint="--json")
    if given.dry_run:
        show_dry_run(parameters, given.as_json, begin_again, lost)
        return
    _execute(parameters, lost, begin_again, given.adopt)


def _execute(parameters: RunParameters, lost: StoredRun | None, begin_again: bool, adopt: bool) -> None:
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
        complain(f"{_server_stage(spec)}: watch the run at {api_url.removesuffix('/api')}{_login(api_url)}")
        asyncio.run(_close_killed_runs())
        publication = _run_flow(held, parameters, progress, adopt, fine_tuning=spec.is_fine_tuning)
    witness, is_trial = Witness.load(spec.run_folder / WITNESS_FOLDER), spec.optimizer.num_steps <= TRIAL_STEPS
    for line in loss_lines(witness.validation, witness.trained.task_names, is_trial=is_trial):
        say(line)
    for line in (*best_lines(witness), *earlier_lines(witness.validation, read(spec.run_folder / METRICS))):
        say(line)
    metrics = recorded_metrics(spec.run_folder / EXPORT, publication.files)
    for line in metrics_lines(metrics) if metrics is not None else []:
        say(line)
    say(f"published: {publication.url}")


def _chosen_from(lost: StoredRun, options: TextOptions | PairsOptions, more: dict[str, str]) -> Chosen:
    with TemporaryDirectory(prefix="t5-run-") as folder:
        of_run = replace(options, config=config_file(lost, Path(folder)))
        return of_run.chosen(more | {"storage.publish_checkpoints_under": json.dumps(lost.under)}, lost.name)


def _login(api_url: str) -> str:
    key = prefect_server.key_file(api_url)
    return f" (to log in: cat {shlex.quote(str(key))})" if key is not None else ""


def _server_stage(spec: RunSpec) -> str:
    from tasks.stages import SERVER, numbered  # imports Prefect, as below

    return numbered(SERVER, predicts=spec.predicts_held_out)


async def _close_killed_runs() -> None:
    # These import Prefect, as below.
    from prefect.client.orchestration import get_client

    from flows.workers.abandoned import close_killed_runs, closed_line

    async with get_client() as client:
        for run in await close_killed_runs(client):
            complain(closed_line(run, "was killed"))


def _run_flow(
    held: HeldRun, parameters: RunParameters, progress: Progress, adopt: bool, *, fine_tuning: bool
) -> Publication:
    # These import Prefect, which reads its settings when it is imported.
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.finetune import finetune_flow
    from flows.pretrain import pretrain_flow

    _arrange_log(progress)
    # Without a terminal, progress appears in the run's log.
    chain = (finetune_flow if fine_tuning else pretrain_flow)(
        held, progress if isinstance(progress, BarProgress) else silent
    )
    with ExitStack() as stack:
        # An automation marks runs as Lost whose heartbeats end. If this one is alive, no worker would give its state
        # back. Prefect reads all settings again here, also those in the current folder.
        with reading_settings():
            stack.enter_context(temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
        publication: Publication = chain(**parameters.model_dump(exclude_none=True), adopt=adopt)
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
    """Print a file for --config of `run` or `finetune`: every setting of a recipe, its value and a comment.

    $ t5-pretrain init base > run.yaml
    $ t5-pretrain init smoke --set optimizer.num_steps=60 > run.yaml
    """
    changed = settings(changes)
    spec = recipe_spec(recipe, changed)
    say(recipe_text(spec, needs_source=not has_own_data(recipe, changed)).removesuffix("\n"))
