"""The parts of a regression night as Prefect tasks, and its artifacts and event."""

from prefect import task
from prefect.events import emit_event

from infra.head.regression.case_stages import NightData
from infra.head.regression.night_run import Night
from t5train.files.os_errors import as_storage_errors
from t5train.regression.night_report import MAX_PLOT_BYTES, PLOT, headline, rows
from t5train.regression.night_results import CaseResult, NightResult
from t5train.regression.regression_cases import RegressionCase
from tasks.run_page import data_url, not_disturbing, shown_png, shown_table
from tasks.stage_progress import StageProgress
from tasks.stages import TASK_OPTIONS, Stage, stage_task

EVENT = "t5-pretrain.regression"
KEY = "regression"
DATA = Stage(f"{KEY}-data", "Make the data")
CONCLUDE = Stage(f"{KEY}-conclude", "Compare with the baselines")
SHOW = Stage(f"{KEY}-show", "Show the results")


@stage_task(DATA)
def make_night_data(night: Night) -> NightData:
    """Make text, vocabulary and shards again."""
    return night.make_data(StageProgress(DATA))


@task(**TASK_OPTIONS | {"name": "Run a case", "task_run_name": "{case.name}"})
@as_storage_errors()
def run_case(night: Night, case: RegressionCase, data: NightData) -> CaseResult:
    """Train the repeats of a case beside the peer, and certify and resume it."""
    return night.run_case(case, data, StageProgress(Stage(f"{KEY}-{case.name}", case.name)))


@stage_task(CONCLUDE)
def conclude_night(night: Night, results: list[CaseResult]) -> NightResult:
    """Compare with the baselines, write everything to the night's folder, and remove old nights."""
    return night.conclude(results, StageProgress(CONCLUDE))


@stage_task(SHOW)
def show_night(night: Night, result: NightResult) -> None:
    """Emit ``t5-pretrain.regression.passed`` or ``.failed``, and create the table and the picture.

    The night has its verdict: what cannot be shown, because the server does not respond, is a warning.
    """
    with not_disturbing("the night's event"):
        _emit(night, result)
    shown_table(KEY).show(rows(result), f"{headline(result)} ({night.folder})")
    with not_disturbing("the history of the nights"):
        picture = (night.folder / PLOT).read_bytes()
        if len(data_url(picture)) <= MAX_PLOT_BYTES:
            shown_png(f"{KEY}-history").show(picture, "Step times over nights")


def _emit(night: Night, result: NightResult) -> None:
    emit_event(
        event=f"{EVENT}.{'passed' if result.passed else 'failed'}",
        resource={"prefect.resource.id": EVENT, "prefect.resource.name": "t5-regression"},
        payload={
            "night": str(night.folder),
            "commit": result.git_commit,
            "findings": [finding.sentence for finding in result.findings],
            "notes": result.notes,
        },
    )
