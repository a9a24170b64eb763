"""Closes flow runs whose process has died: Prefect still shows them as Running, and they occupy a slot of a queue."""

import asyncio
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from flows import run_records
from flows.deploy import POOL
from flows.prefect_server import records_folder
from flows.run_records import RunRecord

_AT_WORK = FlowRunFilter(
    state=FlowRunFilterState(
        type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    )
)
_WHY = "The process of this run ended before the run did."
_OF_THE_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))


def close_abandoned_runs() -> list[str]:
    """Close, in Prefect, the runs of killed processes of this machine, and return their names."""
    with run_records.abandoned(records_folder()) as records:
        return asyncio.run(_close_recorded(records)) if records else []


def close_runs_of_pool() -> list[str]:
    """Close the pool's runs that are active in Prefect but have no living process, and return their names.

    Call it before starting the pool's only worker: a worker's runs end with it, often before they can report.
    """
    return asyncio.run(_close_pool(run_records.living(records_folder())))


async def _close_recorded(records: dict[UUID, RunRecord]) -> list[str]:
    closed = []
    async with get_client() as client:
        for flow_run_id, record in records.items():
            run = await _read(client, flow_run_id)
            if run is not None and _is_left(run, record):
                await _close(client, run)
                closed.append(run.name)
            elif run is not None and run.state_type == StateType.RUNNING:
                continue  # restarted by a process that has not yet taken over the record
            run_records.forget(records_folder(), flow_run_id)
    return closed


def _is_left(run: FlowRun, record: RunRecord) -> bool:
    if run.state_type == StateType.CANCELLING:
        return True
    return run.state_type == StateType.RUNNING and run.state is not None and str(run.state.id) == record.state_id


async def _read(client: PrefectClient, flow_run_id: UUID) -> FlowRun | None:
    try:
        return await client.read_flow_run(flow_run_id)
    except ObjectNotFound:
        return None


async def _close_pool(living: set[UUID]) -> list[str]:
    async with get_client() as client:
        found = await client.read_flow_runs(flow_run_filter=_AT_WORK, work_pool_filter=_OF_THE_POOL)
        runs = [run for run in found if run.id not in living]
        for run in runs:
            await _close(client, run)
    return [run.name for run in runs]


async def _close(client: PrefectClient, run: FlowRun) -> None:
    ended = Cancelled if run.state_type == StateType.CANCELLING else Crashed
    await client.set_flow_run_state(run.id, ended(message=_WHY), force=True)
