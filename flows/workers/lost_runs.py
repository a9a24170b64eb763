"""Lost runs, which an automation of ``deployments/definitions.yaml`` has marked because their heartbeats were missing.

It only sees events, so it may be mistaken: a run may be alive and unable to reach the server, or a person may have
suspended it. Such a run gets its state back. Every other lost run has crashed, and ``run_monitor`` resumes it.
"""

from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Running

from flows.workers.abandoned import OF_THE_POOL, WORKER_LABEL, is_alive
from flows.workers.run_records import RESTORED
from tasks.run_title import name_in

LOST = "Lost"
"""Name of the state that the automation sets."""

_LOST = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[LOST])))


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
