"""Lost runs: their heartbeats are missing, so that their machine is probably down.

An automation of ``deployments/definitions.yaml`` marks them. It forgets which runs it watches when the server stops, so
the run monitors of other machines watch them, too.

Both only see events and may be mistaken: a run may be alive and unable to reach the server, or a person may have
suspended it. Such a run gets its state back. Every other lost run has crashed, and ``run_monitor`` resumes it.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed, Running

from flows.workers.abandoned import OF_THE_POOL, WORKER_LABEL, is_alive, of_offline_workers, runs_of_the_pool
from flows.workers.run_records import RESTORED
from tasks.run_page import name_in

LOST = "Lost"
"""Name of the state of a run that is lost."""

SILENCE = timedelta(minutes=5)
"""How long a run may be silent; it reports every 30 s. The automation has the same limit."""

_LONGEST_GAP = timedelta(minutes=1)
"""If two looks are further apart, the server was perhaps away in between, and runs could not report."""

_MESSAGE = "No heartbeat for five minutes. If its machine is down, start that machine and its worker again."

_LOST = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[LOST])))


class _Silent(NamedTuple):
    """A run that is silent since ``since``; ``seen`` is the time of the last look at it."""

    since: datetime
    seen: datetime


class SilentRuns:
    """Marks running runs of offline workers, other than ``worker``, as Lost once they were silent for long enough.

    Only silence that was watched counts, by looks at most a minute apart.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._silent: dict[UUID, _Silent] = {}

    async def look(self) -> list[str]:
        """Look at all runs once. Returns a line for each that was marked."""
        async with get_client() as client:
            running = await runs_of_the_pool(client, StateType.RUNNING)
            watched = await of_offline_workers(client, self._worker, running)
            self._silent = {run.id: await self._heard(client, run.id) for run in watched}
            lost = [run for run in watched if datetime.now(UTC) - self._silent[run.id].since > SILENCE]
            return [line for run in lost if (line := await _mark(client, run)) is not None]

    async def _heard(self, client: PrefectClient, flow_run_id: UUID) -> _Silent:
        now, before = datetime.now(UTC), self._silent.get(flow_run_id)
        if before is None or now - before.seen > _LONGEST_GAP or await _has_reported(client, flow_run_id, before.since):
            return _Silent(now, now)
        return _Silent(before.since, now)


async def _has_reported(client: PrefectClient, flow_run_id: UUID, since: datetime) -> bool:
    wanted = {"occurred": {"since": since.isoformat()}, "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]}}
    answer = await client.request("POST", "/events/filter", json={"filter": wanted, "limit": 1})
    return bool(answer.json()["events"])


async def _mark(client: PrefectClient, run: FlowRun) -> str | None:
    try:
        now = (await client.read_flow_run(run.id)).state
    except ObjectNotFound:
        return None  # it has been deleted
    if now is None or run.state is None or now.id != run.state.id:
        return None
    await client.set_flow_run_state(run.id, Crashed(name=LOST, message=_MESSAGE), force=True)
    return f"run {name_in(run.name)!r} of {run.labels[WORKER_LABEL]}, which is offline, is {LOST}: no heartbeat"


async def restore_lost_runs(worker: str) -> list[str]:
    """Give the runs of a worker that were lost by mistake their state back. Returns a line for each of them."""
    async with get_client() as client:
        lost = await client.read_flow_runs(flow_run_filter=_LOST, work_pool_filter=OF_THE_POOL)
        taken = [run for run in lost if run.labels.get(WORKER_LABEL) == worker]
        return [line for run in taken if (line := await _restore(client, run)) is not None]


async def _restore(client: PrefectClient, run: FlowRun) -> str | None:
    before = await _state_before(client, run)
    if before.is_running() and not is_alive(run.id):
        return None
    if before.is_running():
        before = Running(name=RESTORED, message="Its process is alive, and only its heartbeats were missing.")
    now = (await client.read_flow_run(run.id)).state
    if now is None or now.name != LOST:
        return None  # its process has reported how it ended
    await client.set_flow_run_state(run.id, before, force=True)
    return f"run {name_in(run.name)!r} was {LOST} by mistake: its state is {before.name} again"


async def _state_before(client: PrefectClient, run: FlowRun) -> State[Any]:
    """Return the state that a run had before it was lost."""
    states = sorted(await client.read_flow_run_states(run.id), key=lambda state: state.timestamp)
    found = [state for state in states if state.name != LOST][-1]
    return State(type=found.type, name=found.name, message=found.message, state_details=found.state_details)
