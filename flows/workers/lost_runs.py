"""Lost runs: their heartbeats are missing, so that their machine is probably down.

Only an automation of ``deployments/prefect.yaml`` marks them. It forgets which runs it watches when the server
stops, so the run monitors of other machines remind it.

It only sees events and may be mistaken: a run may be alive and unable to reach the server, or a person may have
suspended it. Such a run gets its state back. Every other lost run has crashed, and ``run_monitor`` resumes it.
"""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import Event, RelatedResource, Resource
from prefect.states import Running

from flows.workers.abandoned import OF_THE_POOL, WORKER_LABEL, is_alive, of_offline_workers, runs_of_the_pool
from flows.workers.run_records import RESTORED
from tasks.run_page import name_in

LOST = "Lost"
"""Name of the state of a run that is lost."""

FORGOTTEN_AFTER = timedelta(minutes=10)
"""A run that was silent for so long is not watched: the automation would have marked it after five minutes."""

_LOST = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[LOST])))


async def remind_of_silent_runs(client: PrefectClient, worker: str) -> None:
    """Let the automation watch running runs again that it has forgotten, if another, offline worker has taken them.

    After each heartbeat, the automation waits for the next one. So they get one more, and are lost if no other follows.
    """
    running = await runs_of_the_pool(client, StateType.RUNNING)
    for run in await of_offline_workers(client, worker, running):
        if not await _has_reported(client, run.id, datetime.now(UTC) - FORGOTTEN_AFTER):
            await client.request("POST", "/events", json=[await _heartbeat(client, run)])


async def _has_reported(client: PrefectClient, flow_run_id: UUID, since: datetime) -> bool:
    wanted = {"occurred": {"since": since.isoformat()}, "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]}}
    answer = await client.request("POST", "/events/filter", json={"filter": wanted, "limit": 1})
    return bool(answer.json()["events"])


async def _heartbeat(client: PrefectClient, run: FlowRun) -> dict[str, Any]:
    """Return a heartbeat as the process of the run would send it."""
    flow = await client.read_flow(run.flow_id)
    of_flow = {"id": f"prefect.flow.{flow.id}", "name": flow.name, "role": "flow"}
    event = Event(
        event="prefect.flow-run.heartbeat",
        resource=Resource({"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name}),
        related=[RelatedResource({f"prefect.resource.{key}": value for key, value in of_flow.items()})],
    )
    return event.model_dump(mode="json")


async def restore_lost_runs(client: PrefectClient, worker: str) -> list[str]:
    """Give the runs of a worker that were lost by mistake their state back. Returns a line for each of them."""
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
