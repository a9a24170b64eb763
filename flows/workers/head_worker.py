"""The Prefect worker of a head: it leaves runs that will be resumed on another machine to that machine's worker."""

from abc import ABC
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.workers.abandoned import AWAITING, WORKER_LABEL
from flows.workers.lost_runs import restore_lost_runs


class HeadWorker(ProcessWorker, ABC):  # ABC keeps Prefect from registering it as another worker type
    """A process worker of one machine, with the name ``run_records.worker_name()``."""

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        for line in await restore_lost_runs(self.name):  # before a waiting run takes the place of one that is alive
            self._logger.info(line)
        found = await super()._get_scheduled_flow_runs()
        return [each for each in found if may_take(self.name, each.flow_run)]

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: Any = None,  # anyio's, with which Prefect learns the process's id
    ) -> ProcessWorkerResult:
        """Execute a run, which reports itself how it ended; the exit code of its process is not reported again.

        Prefect would report it seconds later, when the run may have been resumed, and mark the next attempt as Crashed.
        """
        result = await super().run(flow_run, configuration, task_status)
        return ProcessWorkerResult(status_code=0, identifier=result.identifier)


def may_take(worker: str, run: FlowRun) -> bool:
    """Return whether a worker may execute a scheduled run: any run, unless it crashed on another machine."""
    is_resumed = run.state is not None and run.state.name == AWAITING
    return not is_resumed or run.labels.get(WORKER_LABEL) == worker
