"""Ends cancelled runs that Prefect's worker did not end.

That worker stops listening for cancellations if the server does not answer for half a minute. Prefect then shows the
run as Cancelling and, after five minutes, as Cancelled, while its process trains on.

It also does not look at runs that have no process any more. A run that is cancelled while it waits for its next attempt
would be Cancelling for five minutes, in which it occupies the queue.
"""

import signal
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound

from flows.deployment.definitions import POOL
from flows.workers.abandoned import WORKER_LABEL, close_run, flow_processes, is_alive, runs_of_the_pool
from infra.node.processes import ProcessIdentity
from tasks.run_page import name_in

PREFECT_TIME = timedelta(seconds=45)
"""Longer than Prefect's worker takes to end a cancelled run."""
SAVE_SECONDS = 60.0
"""Time for a run to save and end, before it is killed."""
_WHY = "This run was cancelled, and no process of it is left."


class CancelledRuns:
    """The cancelled runs of a worker that Prefect did not end."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._told_at: dict[UUID, float] = {}

    async def end(self, client: PrefectClient) -> list[str]:
        """End the processes of cancelled runs, and set those that have none to Cancelled. Returns a line for each run.

        Processes get SIGTERM, and SIGKILL a minute later.
        """
        return [*await self._end_processes(client), *await self._close_without_process(client)]

    async def _end_processes(self, client: PrefectClient) -> list[str]:
        return [
            line
            for flow_run_id, its_processes in flow_processes().items()
            if (run := await _cancelled(client, flow_run_id)) is not None
            and (line := self._end(run, its_processes)) is not None
        ]

    async def _close_without_process(self, client: PrefectClient) -> list[str]:
        cancelling = await runs_of_the_pool(client, StateType.CANCELLING)
        mine = [run for run in cancelling if run.labels.get(WORKER_LABEL) == self._worker]
        ended = [await close_run(client, run, _WHY) for run in mine if _is_old(run) and not is_alive(run.id)]
        return [f"run {run.name!r}, which was cancelled, has no process and is now closed in Prefect" for run in ended]

    def _end(self, run: FlowRun, its_processes: set[ProcessIdentity]) -> str | None:
        told_at = self._told_at.get(run.id)
        if told_at is None:
            self._told_at[run.id] = time.monotonic()
            number, how = signal.SIGTERM, "is told to save and end"
        elif time.monotonic() - told_at > SAVE_SECONDS:
            number, how = signal.SIGKILL, f"did not end within {SAVE_SECONDS:.0f} s and is killed"
        else:
            return None
        for process in its_processes:
            process.send(number)
        return f"the process of run {name_in(run.name)!r}, which was cancelled, {how}"


async def _cancelled(client: PrefectClient, flow_run_id: UUID) -> FlowRun | None:
    """Return the run if it was cancelled so long ago that Prefect's worker should have ended it."""
    try:
        run = await client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return None  # of another server
    is_cancelled = run.state_type in (StateType.CANCELLING, StateType.CANCELLED)
    return run if is_cancelled and run.work_pool_name == POOL and _is_old(run) else None


def _is_old(run: FlowRun) -> bool:
    """Return whether a run was cancelled so long ago that Prefect's worker should have ended it."""
    return run.state is not None and datetime.now(UTC) - run.state.timestamp > PREFECT_TIME
