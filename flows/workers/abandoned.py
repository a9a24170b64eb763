"""Closes flow runs whose process has died: Prefect still shows them as Running, and they occupy a slot of a queue.

Only the machine of a process can tell that it died. It has a record of the process (``run_records``), or it is the
machine of the worker that took the run, whose name Prefect keeps with the run.
"""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from flows.deployment.definitions import POOL
from flows.workers import run_records
from flows.workers.run_records import RESTORED, RunRecord, records_folder
from infra.node import processes
from infra.node.attempts.process_guard import stopping_attempts
from infra.node.processes import ProcessIdentity
from tasks.run_page import name_in, titled

OF_THE_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
WORKER_LABEL = "prefect.worker.name"
"""The label in which Prefect keeps the name of the worker that took a run last."""

AWAITING = "AwaitingResume"
"""Name of the state of a crashed run that the worker of its machine will take again."""

_AWAITING = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[AWAITING])))
_FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
_WHY = "The process of this run ended before the run did."
_WHY_CANCELLED = "This run was cancelled, and its process has ended."
_WHY_NEVER_STARTED = "The worker took this run and did not start it."
WHY_OFFLINE = "The worker that should start this run is offline."
"""The message of a run that was closed before it was started."""

_START_TIME = timedelta(minutes=5)
"""Longer than it takes from when a worker takes a run until the run's process exists."""


class Closed(NamedTuple):
    """A flow run that was closed."""

    name: str
    has_deployment: bool
    """Whether a worker can start it again."""
    is_cancelled: bool = False
    """Whether it ended because somebody cancelled it."""


async def close_killed_runs(client: PrefectClient) -> list[Closed]:
    """Close, in Prefect, the runs of killed processes of this machine, and return them."""
    closed = []
    with run_records.abandoned(records_folder()) as records:
        for flow_run_id, record in records.items():
            run = await _read(client, flow_run_id)
            if run is not None and _is_left(run, record):
                closed.append(await close_run(client, run))
            elif run is not None and run.state is not None and not run.state.is_final():
                continue  # started again: its next process takes over the record
            run_records.forget(records_folder(), flow_run_id)
    return closed


async def close_runs_of_worker(client: PrefectClient, worker: str) -> list[Closed]:
    """Close the runs that a worker of this machine took, and that have no living process, and return them.

    Call it before the worker starts: the runs of the one before it ended with it, often before they could report.
    """
    # Before the server is asked: a run that completes in between must not be taken for one without a process.
    living = run_records.living(records_folder())
    active = await runs_of_the_pool(client, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
    alive = living | flow_processes().keys()
    taken = [run for run in active if run.labels.get(WORKER_LABEL) == worker and run.id not in alive]
    return [await close_run(client, run) for run in taken]


async def close_lost_starts(client: PrefectClient, worker: str) -> list[Closed]:
    """Close the runs that a worker took or should take, but will not start, and return them.

    These are runs of offline workers other than ``worker``, and runs that have been Pending for minutes without a
    process. They would occupy the queue. A run that was started is left alone: it may still be working, without its
    worker.
    """
    awaiting = await client.read_flow_runs(flow_run_filter=_AWAITING, work_pool_filter=OF_THE_POOL)
    pending = await runs_of_the_pool(client, StateType.PENDING)
    of_offline = await of_offline_workers(client, worker, [*awaiting, *pending])
    closed = [await close_run(client, run, WHY_OFFLINE) for run in of_offline]
    for run in pending:
        if _is_stuck(run, worker):
            await client.update_flow_run_labels(run.id, {WORKER_LABEL: worker})  # so that it is resumed here
            closed.append(await close_run(client, run, _WHY_NEVER_STARTED))
    return closed


def is_alive(flow_run_id: UUID) -> bool:
    """Return whether a process of this machine executes the run."""
    return flow_run_id in run_records.living(records_folder()) or flow_run_id in flow_processes()


def is_machine_busy() -> bool:
    """Return whether a run that a worker started is alive here, or ranks are still saving after one was stopped."""
    started = flow_processes().keys() & run_records.living(records_folder())
    return bool(started or stopping_attempts())


async def online_workers(client: PrefectClient) -> set[str]:
    """Return the names of the pool's workers that report to the server."""
    workers = await client.read_workers_for_work_pool(POOL)
    return {each.name for each in workers if each.status == WorkerStatus.ONLINE}


def flow_processes() -> dict[UUID, set[ProcessIdentity]]:
    """Return the processes of this machine that a worker started for a flow run, by its id.

    A run is among them before it has recorded itself.
    """
    found: dict[UUID, set[ProcessIdentity]] = {}
    for pid in processes.find(lambda pid: bool(processes.variable(pid, _FLOW_RUN_VARIABLE))):
        with suppress(ProcessLookupError, ValueError):  # it has just ended
            process = ProcessIdentity.of(pid)
            found.setdefault(UUID(processes.variable(pid, _FLOW_RUN_VARIABLE)), set()).add(process)
    return found


def closed_line(run: Closed, what: str) -> str:
    """Return the line that reports a closed run, and how to continue it unless it is resumed automatically.

    ``what`` happened to it, unless it was cancelled.
    """
    if run.is_cancelled:
        return f"run {run.name!r} was cancelled and is now closed in Prefect"
    start_again = "" if run.has_deployment else "; start the same run again to resume it"
    return f"run {run.name!r} {what} and is now closed in Prefect{start_again}"


def _is_left(run: FlowRun, record: RunRecord) -> bool:
    if run.state_type == StateType.CANCELLING:
        return True
    if run.state_type != StateType.RUNNING or run.state is None:
        return False
    is_restored = run.state.name == RESTORED and run.labels.get(WORKER_LABEL) == run_records.worker_name()
    return is_restored or str(run.state.id) == record.state_id


async def _read(client: PrefectClient, flow_run_id: UUID) -> FlowRun | None:
    try:
        return await client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return None


async def of_offline_workers(client: PrefectClient, worker: str, runs: list[FlowRun]) -> list[FlowRun]:
    """Return those of ``runs`` that a worker other than ``worker`` has taken which is offline."""
    elsewhere = [run for run in runs if run.labels.get(WORKER_LABEL, worker) != worker]
    online = await online_workers(client) if elsewhere else set()
    return [run for run in elsewhere if run.labels[WORKER_LABEL] not in online]


def _is_stuck(run: FlowRun, worker: str) -> bool:
    """Return whether a Pending run of this worker, or without a worker's label, should have a process and has none."""
    is_old = run.state is not None and datetime.now(UTC) - run.state.timestamp > _START_TIME
    return is_old and run.labels.get(WORKER_LABEL, worker) == worker and not is_alive(run.id)


async def runs_of_the_pool(client: PrefectClient, *types: StateType) -> list[FlowRun]:
    """Return the runs of the pool in one of these states."""
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types)))
    return await client.read_flow_runs(flow_run_filter=FlowRunFilter(state=states), work_pool_filter=OF_THE_POOL)


async def close_run(client: PrefectClient, run: FlowRun, why: str = _WHY) -> Closed:
    """Set a run without a living process to Crashed, or to Cancelled if it was being cancelled."""
    is_cancelled, name = run.state_type == StateType.CANCELLING, name_in(run.name)
    state: State[Any] = Cancelled(message=_WHY_CANCELLED) if is_cancelled else Crashed(message=why)
    await client.set_flow_run_state(run.id, state, force=True)
    await client.set_flow_run_name(run.id, name if is_cancelled else titled(name, why))  # it showed progress
    return Closed(name, run.deployment_id is not None, is_cancelled)
