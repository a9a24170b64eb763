"""From text to a published, certified T5 checkpoint: the flow."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import Flow, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows import run_parameters
from flows.server.prefect_settings import reading_settings
from flows.spec_from_recipe import require_recipe_for
from flows.workers import run_records
from flows.workers.run_records import records_folder
from infra.head.launch.held_run import HeldRun
from infra.head.launch.start_record import is_cancelled, note_cancelled
from infra.head.preflight.run_checks import publish_url
from infra.head.runs.run_state import what_is_saved
from infra.head.training_run import hold_ready_run
from t5train.files.os_errors import as_storage_errors
from t5train.progress import Progress, silent
from t5train.records.stage_records import Pairs, PairShards, Publication, TokenizerFiles, TokenShards
from t5train.spec import RunSpec
from tasks import stages
from tasks.prefect_log import REPEATED_AT_THE_END, library_log, prepare_run_logs
from tasks.reports import StageTable
from tasks.run_page import not_disturbing
from tasks.shown_failures import naming_run_folder, showing_failures
from tasks.stage_tasks import (
    certify_export,
    consolidate_weights,
    evaluate_on_pairs,
    export_model,
    make_corpus,
    make_pair_shards,
    make_pairs,
    make_shards,
    make_tokenizer,
    make_tokenizer_of_pairs,
    publish_export,
    summarise,
    train,
)
from tasks.stages import FLOW_OPTIONS

_ANSWER_SECONDS = 5.0


def flow_run_name() -> str:
    """Return how a run is called in Prefect: by its name if given, otherwise by its recipe."""
    parameters = flow_run.parameters
    return f"{parameters.get('run_name') or parameters['recipe']}{' (trial)' if parameters.get('trial') else ''}"


def pretrain_flow(held: HeldRun | None = None, progress: Progress = silent) -> Flow[..., Publication]:
    """Return the flow that chains all stages. Each stage reports its progress to ``progress``, and to Prefect.

    ``held`` is the run if this process has already locked it. It and ``progress`` cannot be parameters of the flow,
    because Prefect records these.
    """

    @flow(name="t5-pretrain", flow_run_name=flow_run_name, **FLOW_OPTIONS)
    @showing_failures
    @as_storage_errors()
    def pretrain(  # noqa: PLR0913, PLR0917 - Prefect makes form and validation from the signature
        recipe: run_parameters.Recipe,
        root: run_parameters.Root,
        corpus: run_parameters.Corpus = None,
        steps: run_parameters.Steps = None,
        run_name: run_parameters.RunName = None,
        trial: run_parameters.Trial = False,
        settings: run_parameters.Settings = None,
        publish_under: run_parameters.PublishUnder = None,
        hostfile: run_parameters.Hostfile = None,
        scratch: run_parameters.Scratch = None,
        deployed_settings: run_parameters.DeployedSettings = None,
        adopt: run_parameters.Adopt = False,
    ) -> Publication:
        """From text to a published, certified T5 checkpoint. Finished stages are verified and reused.

        ``run_parameters`` describes the parameters.
        """
        return train_and_publish(locals(), held, progress, fine_tuning=False)

    return pretrain


pretrain = pretrain_flow()
"""The flow that deployments execute."""


def train_and_publish(
    given: Mapping[str, Any], held: HeldRun | None, progress: Progress, *, fine_tuning: bool
) -> Publication:
    """Do what a flow with the parameters ``given`` is for. For the other arguments, see ``pretrain_flow``."""
    record_process()
    prepare_run_logs()
    parameters, adopt = run_parameters.RunParameters.of(given), bool(given["adopt"])
    require_recipe_for(fine_tuning, parameters.recipe)
    spec = parameters.spec_for_this_machine()
    _show_parameters(parameters.used(), adopt)
    with hold_ready_run(spec, held) as run, library_log(), _explaining_stop(spec), _noting_cancellation():
        return _stages(spec, run, progress, adopt)


def _show_parameters(used: run_parameters.RunParameters, adopt: bool) -> None:
    """Show on the run's page the parameters that it uses. Those of its deployment may contain others."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    shown = used.model_dump(mode="json", exclude_none=True) | {"adopt": adopt}
    with not_disturbing("the run's parameters"), get_client(sync_client=True) as client:
        client.update_flow_run(context.flow_run.id, parameters=shown)


def _stages(spec: RunSpec, run: HeldRun, progress: Progress, adopt: bool) -> Publication:
    table = StageTable(run.folder, predicts=spec.predicts_held_out)
    with naming_run_folder(run.folder):
        tokenizer, shards = (_from_pairs if spec.is_fine_tuning else _from_text)(spec, table, progress)
        retried = train.with_options(retries=spec.cluster.retries)
        checkpoint = table.add(stages.TRAIN, retried(spec, shards, run, progress, adopt))
        weights = table.add(stages.CONSOLIDATE, consolidate_weights(spec, checkpoint, progress))
        exported = table.add(stages.EXPORT, export_model(spec, weights, tokenizer, progress))
        pairs = table.records.get(stages.PAIRS.title)
        if isinstance(pairs, Pairs) and spec.predicts_held_out:
            exported = table.add(stages.EVALUATE, evaluate_on_pairs(spec, exported, pairs, progress))
        certified = table.add(stages.CERTIFY, certify_export(spec, weights, exported, progress))
        run.confirm_held()
        publication = publish_export(spec, certified, publish_url(spec), _while_held(run, progress))
        table.add(stages.PUBLISH, publication)
        summarise(spec, table.records, publication)
        return publication


def _from_text(spec: RunSpec, table: StageTable, progress: Progress) -> tuple[TokenizerFiles, TokenShards]:
    corpus = table.add(stages.CORPUS, make_corpus(spec, progress))
    tokenizer = table.add(stages.TOKENIZER, make_tokenizer(spec, corpus, progress))
    return tokenizer, table.add(stages.SHARDS, make_shards(spec, corpus, tokenizer, progress))


def _from_pairs(spec: RunSpec, table: StageTable, progress: Progress) -> tuple[TokenizerFiles, PairShards]:
    pairs = table.add(stages.PAIRS, make_pairs(spec, progress))
    tokenizer = table.add(stages.TOKENIZER, make_tokenizer_of_pairs(spec, pairs, progress))
    return tokenizer, table.add(stages.PAIR_SHARDS, make_pair_shards(spec, pairs, tokenizer, progress))


def _while_held(run: HeldRun, progress: Progress) -> Progress:
    """Return a callback that ends the work that reports to it once another head has taken over the run."""

    def report(what: str, done: int, total: int | None) -> None:
        run.require_held()
        progress(what, done, total)

    return report


@contextmanager
def _explaining_stop(spec: RunSpec) -> Iterator[None]:
    """If a signal ends the flow, log whether it was cancelled, what was saved, and how to continue."""
    try:
        yield
    except TerminationSignal as signal:
        what = "cancelled in Prefect" if is_cancelled(signal) else "stopped (SIGTERM)"
        saved = what_is_saved(spec.run_folder, spec.optimizer.num_steps)
        get_run_logger().warning(
            f"The run was {what}; {saved}. To continue, retry it, or start a run with the same name and settings",
            extra=REPEATED_AT_THE_END,
        )
        raise


@contextmanager
def _noting_cancellation() -> Iterator[None]:
    """Note on the signal that ends the flow if somebody cancelled it: the signal itself is the same for a shutdown."""
    try:
        yield
    except TerminationSignal as signal:
        if _is_cancelled():
            note_cancelled(signal)
        raise


def _is_cancelled() -> bool:
    """Whether the server says that this flow run is cancelled; False if it does not answer."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    try:
        with (
            reading_settings(),
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),  # with retries, it would take minutes
            get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_SECONDS}) as client,
        ):
            state = client.read_flow_run(context.flow_run.id).state
    except Exception:  # the run is ending, and its ranks have saved: only the record is less exact
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def record_process() -> None:
    """Record this process, so that others can detect if it ends without reporting to Prefect."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.flow_run.state is not None:
        run_records.hold(records_folder(), context.flow_run.id, context.flow_run.state.id)
