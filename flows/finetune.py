"""From pairs to a published, certified T5 checkpoint: the flow."""

from prefect import Flow, flow

from flows import run_parameters
from flows.pretrain import flow_run_name, train_and_publish
from infra.head.launch.held_run import HeldRun
from t5train.files.os_errors import as_storage_errors
from t5train.progress import Progress, silent
from t5train.records.stage_records import Publication
from tasks.shown_failures import showing_failures
from tasks.stages import FLOW_OPTIONS


def finetune_flow(held: HeldRun | None = None, progress: Progress = silent) -> Flow[..., Publication]:
    """Return the flow that chains all stages of a run on pairs. For the arguments, see ``flows.pretrain``."""

    @flow(name="t5-finetune", flow_run_name=flow_run_name, **FLOW_OPTIONS)
    @showing_failures
    @as_storage_errors()
    def finetune(  # noqa: PLR0913, PLR0917 - Prefect makes form and validation from the signature
        recipe: run_parameters.FineTuningRecipe,
        root: run_parameters.Root,
        train: run_parameters.Train = None,
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
        """From pairs to a published, certified T5 checkpoint. Finished stages are verified and reused.

        ``run_parameters`` describes the parameters.
        """
        return train_and_publish(locals(), held, progress, fine_tuning=True)

    return finetune


finetune = finetune_flow()
"""The flow that deployments execute."""
