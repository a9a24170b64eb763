"""Whether anything got worse since the baseline: the flow that runs every night."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from flows.pretrain import record_process
from infra.head.regression.night_run import begin_night
from t5train.files.os_errors import as_storage_errors
from t5train.regression.night_folders import MAX_NIGHTS
from t5train.regression.night_report import headline
from t5train.regression.regression_cases import CaseName
from tasks.prefect_log import library_log, prepare_run_logs
from tasks.regression_tasks import conclude_night, make_night_data, run_case, show_night
from tasks.shown_failures import showing_failures
from tasks.stages import FLOW_OPTIONS


@flow(name="t5-regression", **FLOW_OPTIONS)
@showing_failures
@as_storage_errors()
def regression(
    root: Path,
    cases: list[CaseName] | None = None,
    hostfile: Path | None = None,
    keep_nights: Annotated[int, Field(ge=1, le=MAX_NIGHTS)] = 14,
) -> State[Any]:
    """Train small cases from a fixed seed, and compare losses, weights, times and memory with the baseline.

    The flow run fails if anything got worse; the message of its state is the first finding. The first night of a case
    on a machine records the baseline. Two nights under the same root never run at the same time: the second is refused.

    Args:
        root: Absolute path of the folder that holds everything, on the machine that executes the run. Nights are in
            root/regression/nights, accepted baselines in root/regression/baselines.
        cases: Names of the cases to run; all when left out. The case hosts needs a hostfile.
        hostfile: Absolute path of a file of lines "name slots=N". If given, one more case runs on these hosts.
        keep_nights: How many nights are kept. The folders of older ones are removed, and their files on hosts.

    """
    record_process()
    prepare_run_logs()
    with library_log(), begin_night(root, cases, hostfile, keep_nights) as night:
        data = make_night_data(night)
        result = conclude_night(night, [run_case(night, case, data) for case in night.cases])
        show_night(night, result)
    for note in result.notes:
        get_run_logger().warning("%s", note)
    for finding in result.findings:
        get_run_logger().error("%s", finding.sentence)
    made = Completed if result.passed else Failed
    return made(message=headline(result))
