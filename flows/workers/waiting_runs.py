"""Refuses runs that wait for their turn and could not start, and skips scheduled runs that are late.

Otherwise a mistake would wait behind days of training, and the runs of many nights would follow each other after it.
"""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
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
from prefect.states import Cancelled, Failed
from pydantic import ValidationError

from flows.deployment.deployment_defaults import FLOW
from flows.run_parameters import RunParameters, run_title
from flows.server.prefect_server import NEUTRAL_FOLDER
from flows.workers.abandoned import OF_THE_POOL, online_workers
from t5train.errors import SpecError, T5TrainError
from t5train.report.failure_report import Failure, failure_report
from tasks.run_title import titled

SKIP_AFTER = timedelta(hours=1)
"""How long a run of a schedule may wait."""
_CHECK_SECONDS = 120.0
_OF_THE_FLOW = FlowFilter(name=FlowFilterName(any_=[FLOW]))


class WaitingRuns:
    """The runs that wait in the pool. Each is checked once by every worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._checked: set[UUID] = set()

    def check(self) -> list[str]:
        """Set runs that could not start to Failed, and late runs of schedules to Skipped. Returns a line for each."""
        return asyncio.run(self._check())

    async def _check(self) -> list[str]:
        async with get_client() as client:
            return [*await _skip_late(client), *await self._refuse_impossible(client)]

    async def _refuse_impossible(self, client: PrefectClient) -> list[str]:
        refused = []
        new = [run for run in await _waiting(client, _OF_THE_FLOW) if run.id not in self._checked]
        # Another worker's machine may have what this one lacks.
        is_only_worker = bool(new) and await online_workers(client) <= {self._worker}
        for run in new:
            why = _wrong_settings(run, is_only_worker) or (_unable_machine(run) if is_only_worker else "")
            if why and await _end(client, run, Failed(message=f"The run could not start: {why}")):
                await _explain(client, run, why)
                refused.append(f"run {run_title(run.parameters)!r} could not start and has failed: {why}")
            self._checked.add(run.id)
        return refused


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


def _wrong_settings(run: FlowRun, is_only_worker: bool) -> str:
    """Return why the run could start on no machine; empty if it could, or if that depends on files of a machine."""
    try:
        parameters = RunParameters.of(run.parameters)
        if is_only_worker or not parameters.names_local_files:
            parameters.possible_spec()
    except (T5TrainError, ValidationError) as error:
        return str(error)
    return ""


def _unable_machine(run: FlowRun) -> str:
    """Return why the run could not start on this machine; empty if it could, or if the check did not end in time."""
    try:
        check = subprocess.run(
            [sys.executable, "-P", "-m", "flows.workers.run_check"],
            input=RunParameters.of(run.parameters).model_dump_json(),
            cwd=NEUTRAL_FOLDER,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""  # the run makes the same checks when it starts
    return "" if check.returncode else check.stdout.strip()  # also if the check itself failed


async def _end(client: PrefectClient, run: FlowRun, ended: State[Any]) -> bool:
    """End a run that waits. Returns whether it was still waiting; one that has started makes the checks itself."""
    state = (await client.read_flow_run(run.id)).state
    if state is None or not state.is_scheduled():
        return False
    await client.set_flow_run_state(run.id, ended, force=True)
    return True
