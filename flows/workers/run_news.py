"""Lines that say when a worker's runs start and how they end, for the terminal of ``up`` and ``worker``."""

from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.workers.abandoned import OF_THE_POOL, WORKER_LABEL
from tasks.prefect_log import is_stop
from tasks.run_title import name_in

_RUNNING = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])))


class RunNews:
    """What happened to the runs of one worker since the last look. Runs that ended before this object was made are old.

    A run that starts and ends between two looks is reported once, as ended.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._ended = FlowRunFilter(end_time=FlowRunFilterEndTime(after_=datetime.now(UTC)))
        self._told: dict[UUID, UUID] = {}
        """The newest state that was reported, by run."""

    async def look(self) -> list[str]:
        """Return a line for every run of the worker that has started or ended."""
        async with get_client() as client:
            found = [
                *await client.read_flow_runs(flow_run_filter=_RUNNING, work_pool_filter=OF_THE_POOL),
                *await client.read_flow_runs(flow_run_filter=self._ended, work_pool_filter=OF_THE_POOL),
            ]
        return list(self._news([run for run in found if run.labels.get(WORKER_LABEL) == self._worker]))

    def _news(self, runs: list[FlowRun]) -> Iterator[str]:
        for run in runs:
            if run.state is not None and self._told.get(run.id) != run.state.id:
                again = " again" if run.id in self._told else ""
                self._told[run.id] = run.state.id
                yield _line(name_in(run.name), run.state, again)


def _line(name: str, state: State, again: str) -> str:
    """Return what happened to a run that is running or has ended, with the reason if it did not complete."""
    if state.type == StateType.RUNNING:
        return f"run {name!r} is running{again}"
    if state.type == StateType.COMPLETED:
        return f"run {name!r} completed"
    if is_stop(state.message or ""):
        return f"run {name!r} was stopped by a signal"
    how, why = (state.name or state.type.value).lower(), " ".join((state.message or "").split())
    return f"run {name!r} {how}{f': {why}' if why else ''}"
