"""Runs that a worker left behind: nobody works on them, and yet they hold the places of their queue."""

import asyncio

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Crashed

from flows.deploy import POOL

_AT_WORK = FlowRunFilter(
    state=FlowRunFilterState(
        type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    )
)
_WHY = "The worker of this run ended before it."
_OF_THE_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))


def close_abandoned_runs() -> list[str]:
    """End, for Prefect, the runs of the pool that seem to be at work; their names.

    To be called by the one who starts the pool's only worker, before that starts: a worker's runs end with it, and
    often before they can tell.
    """
    return asyncio.run(_close())


async def _close() -> list[str]:
    async with get_client() as client:
        runs = await client.read_flow_runs(flow_run_filter=_AT_WORK, work_pool_filter=_OF_THE_POOL)
        for run in runs:
            ended = Cancelled if run.state_type == StateType.CANCELLING else Crashed
            await client.set_flow_run_state(run.id, ended(message=_WHY), force=True)
    return [run.name for run in runs]
