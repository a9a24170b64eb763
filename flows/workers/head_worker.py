"""The Prefect worker of a head: it runs one run at a time, and goes on when the server does not answer.

Runs that crashed are left to the worker of the machine where they did, because their files may be there only.
"""

import asyncio
from abc import ABC
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.workers.abandoned import AWAITING, WORKER_LABEL, is_machine_busy, online_workers
from flows.workers.lost_runs import restore_lost_runs

T = TypeVar("T")


class HeadWorker(ProcessWorker, ABC):  # ABC keeps Prefect from registering it as another worker type
    """A process worker of one machine, with the name ``run_records.worker_name()``."""

    _is_draining = False
    _is_cut_off = False

    def drain(self) -> None:
        """Take no more runs."""
        self._is_draining = True

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Take runs, if the server answers."""
        return await self._tolerant(super().get_and_submit_flow_runs, otherwise=[])

    async def _sync_and_initialize(self) -> None:
        await self._tolerant(super()._sync_and_initialize, otherwise=None)

    async def _tolerant(self, work: Callable[[], Awaitable[T]], otherwise: T) -> T:
        """Prefect's worker would end, and kill its runs, after minutes without a server, or if its key is refused."""
        try:
            result = await work()
        except Exception as error:  # any error of Prefect's client, as in the run monitor
            if not self._is_cut_off:
                self._logger.warning("Prefect's server does not serve this worker; runs go on without it: %r", error)
            self._is_cut_off = True
            return otherwise
        if self._is_cut_off:
            self._logger.warning("Prefect's server serves this worker again")
        self._is_cut_off = False
        return result

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        # First, or a waiting run would take the place of one that is alive.
        for line in await restore_lost_runs(self.client, self.name):
            self._logger.info(line)
        if self._is_draining or await asyncio.to_thread(is_machine_busy):
            return []
        found = await super()._get_scheduled_flow_runs()
        elsewhere = [each for each in found if each.flow_run.labels.get(WORKER_LABEL, self.name) != self.name]
        online = await online_workers(self.client) if elsewhere else set[str]()
        return [each for each in found if may_take(self.name, each.flow_run, online)]

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


def may_take(worker: str, run: FlowRun, online: Collection[str]) -> bool:
    """Return whether a worker may execute a scheduled run: one that is new, or that it had before.

    A run of another machine may be taken if that machine's worker is not among those ``online``, unless that worker is
    to resume it: somebody has started it again, and its files may be on a shared disk.
    """
    before = run.labels.get(WORKER_LABEL, worker)
    is_resumed = run.state is not None and run.state.name == AWAITING
    return before == worker or not (is_resumed or before in online)
