"""From text to a published, certified T5 checkpoint: the flow."""

from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import Flow, flow
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from pydantic import Field

from flows import run_records
from flows.prefect_server import records_folder
from flows.spec_from_recipe import resolve
from infra.head.launch.held_run import HeldRun
from infra.head.preflight.run_checks import publish_url, require_possible
from infra.head.training_run import hold_ready_run
from t5train.files.os_errors import as_storage_errors
from t5train.progress import Progress, silent
from t5train.records.stage_records import Publication
from t5train.spec import RUN_NAME_PATTERN, RunSpec
from tasks.prefect_log import drop_needless_tracebacks, library_log
from tasks.stage_progress import StageTable
from tasks.stage_tasks import (
    certify_export,
    consolidate_weights,
    export_model,
    make_corpus,
    make_shards,
    make_tokenizer,
    publish_export,
    train,
)
from tasks.summary import summarise

RecipeName = Literal[
    "smoke",
    "small",
    "base",
    "moe",
    "pipeline",
    "zero1_offload",
    "zero2_offload",
    "zero3",
    "t5_3b_one_gpu",
    "t5_11b_one_gpu",
]
"""The names of the recipes in t5train.spec.recipes, written out so that Prefect's form for a run offers them."""


def _flow_run_name() -> str:
    """Return the run's name if given, otherwise the recipe's."""
    parameters = flow_run.parameters
    return str(parameters.get("run_name") or parameters["recipe"])


def pretrain_flow(held: HeldRun | None = None, progress: Progress = silent) -> Flow[..., Publication]:
    """Return the flow that chains all stages. Each stage reports its progress to ``progress``, and to Prefect.

    ``held`` is the run if this process has already locked it. It and ``progress`` cannot be parameters of the flow,
    because Prefect records these.
    """

    @flow(name="t5-pretrain", flow_run_name=_flow_run_name)
    @as_storage_errors()
    def pretrain(
        recipe: RecipeName,
        root: Path,
        settings: dict[str, Any] | None = None,
        run_name: Annotated[str, Field(pattern=RUN_NAME_PATTERN)] | None = None,
        publish_to: Annotated[str, Field(min_length=1)] | None = None,
        adopt: bool = False,
    ) -> Publication:
        """From text to a published, certified T5 checkpoint. Finished stages are verified and reused.

        Args:
            recipe: Recipe to start from.
            root: Absolute path of the folder that holds everything a run makes, on the machine that executes the run.
            settings: Changes to the recipe, as "part.key": value, such as {"optimizer.num_steps": 1000}.
            run_name: Name of the run's folder in root/runs; made of recipe and settings when left out.
            publish_to: Folder or fsspec URL to publish to; a folder named after the run in root/published if left out.
            adopt: Take over a run whose checkpoints on its hosts belong to another head that has died.

        """
        record_process()
        drop_needless_tracebacks()
        spec = resolve(recipe, settings or {}, root=root, run_name=run_name, publish_to=publish_to)
        require_possible(spec)
        with hold_ready_run(spec, held) as run, library_log():
            return _stages(spec, run, progress, adopt)

    return pretrain


pretrain = pretrain_flow()
"""The flow that deployments execute."""


def _stages(spec: RunSpec, run: HeldRun, progress: Progress, adopt: bool) -> Publication:
    stages = StageTable()
    corpus = stages.add("corpus", make_corpus(spec, progress))
    tokenizer = stages.add("tokenizer", make_tokenizer(spec, corpus, progress))
    shards = stages.add("shards", make_shards(spec, corpus, tokenizer, progress))
    retried = train.with_options(retries=spec.cluster.retries)
    checkpoint = stages.add("train", retried(spec, shards, run, progress, adopt))
    weights = stages.add("consolidate", consolidate_weights(spec, checkpoint, progress))
    exported = stages.add("export", export_model(spec, weights, tokenizer, progress))
    certified = stages.add("certify", certify_export(spec, exported, progress))
    publication = stages.add("publish", publish_export(spec, certified, publish_url(spec), progress))
    summarise(spec, checkpoint, publication)
    return publication


def record_process() -> None:
    """Record this process, so that others can detect if it ends without reporting to Prefect."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.flow_run.state is not None:
        run_records.hold(records_folder(), context.flow_run.id, context.flow_run.state.id)
