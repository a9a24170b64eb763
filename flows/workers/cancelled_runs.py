"""Ends cancelled runs that Prefect's worker did not end.

That worker stops listening for cancellations if the server does not answer for half a minute. Prefect then shows the
run as Cancelling and, after five minutes, as Cancelled, while its process trains on.
"""

import signal
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound

from flows.deployment.deploy import POOL
from flows.workers.abandoned import flow_processes
from infra.node.processes import ProcessIdentity
from tasks.run_title import name_in

PREFECT_TIME = timedelta(seconds=45)
"""Longer than Prefect's worker takes to end a cancelled run."""
SAVE_SECONDS = 60.0
"""Time for a run to save and end, before it is killed."""


class CancelledRuns:
    """The cancelled runs whose processes were still alive."""

    def __init__(self) -> None:
        self._told_at: dict[UUID, float] = {}

    async def end(self) -> list[str]:
        """Send SIGTERM to the processes of cancelled runs, and SIGKILL a minute later. Returns a line for each run."""
        if not (alive := flow_processes()):
            return []
        async with get_client() as client:
            return [
                line
                for flow_run_id, its_processes in alive.items()
                if (run := await _cancelled(client, flow_run_id)) is not None
                and (line := self._end(run, its_processes)) is not None
            ]

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
    if run.state is None or not is_cancelled or run.work_pool_name != POOL:
        return None
    return run if datetime.now(UTC) - run.state.timestamp > PREFECT_TIME else None
