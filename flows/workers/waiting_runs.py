"""Refuses runs that wait for their turn and could not start, and skips scheduled runs that are late.

Otherwise a mistake would wait behind days of training, and the runs of many nights would follow each other after it.
"""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Failed
from pydantic import ValidationError

from flows.deployment.deployment_defaults import FLOW
from flows.run_parameters import RunParameters, run_title
from flows.workers.abandoned import OF_THE_POOL, online_workers
from flows.workers.machine_check import MachineCheck
from t5train.errors import SpecError, T5TrainError
from t5train.report.failure_report import Failure, failure_report
from t5train.spec.settings import explain
from tasks.run_title import titled

SKIP_AFTER = timedelta(hours=1)
"""How long a run of a schedule may wait."""
_MOST_TRIES = 3
"""How many checks of a run on this machine may end without a result, for example because they took too long."""
_OF_THE_FLOW = FlowFilter(name=FlowFilterName(any_=[FLOW]))


class _Wait(NamedTuple):
    """A waiting run, and the time at which it became due. A retry sets a new time; marking the run as late does not."""

    flow_run_id: UUID
    due: datetime | None

    @classmethod
    def of(cls, run: FlowRun) -> Self:
        return cls(run.id, run.next_scheduled_start_time)


class WaitingRuns:
    """The runs that wait in the pool. Every worker checks each once, and again when somebody retries it.

    Settings are checked at once. Checks of this machine take long, so they run in the background, one at a time.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._checked: set[_Wait] = set()
        """Runs whose settings were checked."""
        self._decided: set[_Wait] = set()
        """Runs that were refused, or could start on this machine."""
        self._incomplete: Counter[_Wait] = Counter()
        """How many checks of a run on this machine did not complete."""
        self._machine_check: MachineCheck | None = None

    def check(self) -> list[str]:
        """Set runs that could not start to Failed, and late runs of schedules to Skipped. Returns a line for each.

        Whether this machine lacks something for a run is known at one of the next calls.
        """
        return asyncio.run(self._check())

    async def _check(self) -> list[str]:
        async with get_client() as client:
            return [*await _skip_late(client), *await self._refuse_impossible(client)]

    async def _refuse_impossible(self, client: PrefectClient) -> list[str]:
        waiting = await _waiting(client, _OF_THE_FLOW)
        refused = await self._refuse_wrong_settings(client, waiting)
        # Another worker's machine may have what this one lacks.
        is_only_worker = bool(waiting) and await online_workers(client) <= {self._worker}
        return [*refused, *await self._refuse_on_machine(client, waiting if is_only_worker else [])]

    async def _refuse_wrong_settings(self, client: PrefectClient, waiting: list[FlowRun]) -> list[str]:
        refused = []
        for run in waiting:
            if (wait := _Wait.of(run)) in self._checked:
                continue
            if why := _wrong_settings(run):
                refused += await _refuse(client, run, why)
                self._decided.add(wait)
            self._checked.add(wait)
        return refused

    async def _refuse_on_machine(self, client: PrefectClient, waiting: list[FlowRun]) -> list[str]:
        """Refuse the run whose check has ended with a reason, and begin to check another one."""
        if self._machine_check is not None and self._machine_check.is_alive():
            return []
        refused = await self._conclude(client, self._machine_check, waiting) if self._machine_check else []
        self._machine_check = self._next_check(waiting)
        return refused

    async def _conclude(self, client: PrefectClient, check: MachineCheck, waiting: list[FlowRun]) -> list[str]:
        checked = _Wait.of(check.flow_run)
        if check.reason is None:
            self._incomplete[checked] += 1
            return []
        if checked not in map(_Wait.of, waiting):
            return []  # it has started, or another worker is online now
        refused = await _refuse(client, check.flow_run, check.reason) if check.reason else []
        self._decided.add(checked)
        return refused

    def _next_check(self, waiting: list[FlowRun]) -> MachineCheck | None:
        left = [run for run in waiting if _Wait.of(run) not in self._decided]
        run = min(left, key=lambda run: self._incomplete[_Wait.of(run)], default=None)
        if run is None or self._incomplete[_Wait.of(run)] == _MOST_TRIES:
            return None
        check = MachineCheck(run)
        check.start()
        return check


async def _refuse(client: PrefectClient, run: FlowRun, why: str) -> list[str]:
    """Set a run to Failed if it still waits. Returns the line that says so."""
    if not await _end(client, run, Failed(message=f"The run could not start: {why}")):
        return []
    await _explain(client, run, why)
    return [f"run {run_title(run.parameters)!r} could not start and has failed: {why}"]


async def _explain(client: PrefectClient, run: FlowRun, why: str) -> None:
    """Show the reason where a run that has started shows it: in the title of its page, and in an artifact."""
    failure = Failure(SpecError(why), stage=None, run_folder=None)
    name = run_title(run.parameters)
    await client.set_flow_run_name(run.id, titled(name, f"{failure.what}: {failure.cause}"))
    report = ArtifactCreate(key="failure", type="markdown", data=failure_report(failure), flow_run_id=run.id)
    await client.create_artifact(report)


async def _skip_late(client: PrefectClient) -> list[str]:
    """Skip runs that a schedule created, and that have waited too long."""
    skipped = []
    for run in await _waiting(client):
        due = run.expected_start_time
        is_new = run.auto_scheduled and run.run_count == 0  # one that is resumed or retried was due long ago
        if not is_new or due is None or datetime.now(UTC) - due < SKIP_AFTER:
            continue
        why = f"Skipped, because it was due at {due:%Y-%m-%d %H:%M} UTC and could not start within an hour."
        if await _end(client, run, Cancelled(name="Skipped", message=why)):
            skipped.append(f"run {run.name!r} of a schedule was due at {due:%Y-%m-%d %H:%M} UTC and is skipped")
    return skipped


async def _waiting(client: PrefectClient, of_flow: FlowFilter | None = None) -> list[FlowRun]:
    scheduled = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    due = FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC))
    return await client.read_flow_runs(
        flow_filter=of_flow,
        flow_run_filter=FlowRunFilter(state=scheduled, next_scheduled_start_time=due),
        work_pool_filter=OF_THE_POOL,
    )


def _wrong_settings(run: FlowRun) -> str:
    """Return why the run could start on no machine; empty if it could, or if that depends on files of a machine."""
    try:
        parameters = RunParameters.of(run.parameters)
        if not parameters.names_local_files:
            parameters.possible_spec()
    except ValidationError as error:
        return explain(error)
    except T5TrainError as error:
        return str(error)
    return ""


async def _end(client: PrefectClient, run: FlowRun, ended: State[Any]) -> bool:
    """End a run that waits. Returns whether it was still waiting; one that has started makes the checks itself."""
    try:
        state = (await client.read_flow_run(run.id)).state
    except ObjectNotFound:
        return False  # it has been deleted
    if state is None or not state.is_scheduled():
        return False
    await client.set_flow_run_state(run.id, ended, force=True)
    return True
