"""The run monitor, which works beside a worker: it closes abandoned runs, ends cancelled ones that are still alive,
resumes crashed ones, and skips late ones of schedules.

A run that crashed is scheduled again, on the machine where it crashed, because its files may be there only. The state
in Prefect says what is still to be decided: each run whose state is named Crashed or Lost is either scheduled again or,
after too many crashes without a new checkpoint, gets the state NotResumed. Nothing else resumes a run, and runs that
failed or were cancelled are in other states. Runs that are Lost by mistake get their state back first. The monitor ends
no run of another machine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Scheduled
from pydantic import ValidationError

from flows.run_parameters import RunParameters
from flows.workers.abandoned import (
    AWAITING,
    OF_THE_POOL,
    WHY_OFFLINE,
    WORKER_LABEL,
    close_killed_runs,
    close_lost_starts,
    close_runs_of_worker,
    closed_line,
    is_alive,
    runs_of_the_pool,
)
from flows.workers.cancelled_runs import CancelledRuns
from flows.workers.lost_runs import LOST, remind_of_silent_runs, restore_lost_runs
from t5train.checkpoint.resume_point import last_complete
from t5train.errors import T5TrainError
from tasks.prefect_log import is_stop
from tasks.run_page import name_in

MOST_RESUMES = 3
"""How many times in a row a run is resumed without a new complete checkpoint in between."""

NOT_RESUMED = "NotResumed"
"""Name of the state of a crashed run that is not resumed."""

SKIP_AFTER = timedelta(hours=1)
"""How long a run of a schedule may wait: otherwise the runs of many nights would follow a long training."""

RESUMES_LABEL, CHECKPOINT_LABEL = "t5-pretrain.resumes", "t5-pretrain.checkpoint"
"""Labels of a flow run: how often it was resumed since its last checkpoint, and the tag of that checkpoint."""

_REMEDY = "Its log and its folder attempts/ show why. Fix the cause, then choose Retry in Prefect"
_NOT_SUBMITTED = "Failed to submit flow run to infrastructure"
"""How Prefect's worker begins the message of a run that it could not start, such as for a server that was busy."""
_WAITING = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
_CRASHED = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Crashed", LOST])))


class RunMonitor:
    """Closes and resumes the runs of one worker. Methods return lines that say what was done."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._cancelled_runs, self._news = CancelledRuns(worker), _News(worker)

    def begin(self) -> list[str]:
        """Close what the previous worker left. Call it before the worker starts."""
        return _with_client(self._begin)

    def skip_late(self) -> list[str]:
        """Set runs that a schedule created, and that have waited too long, to Skipped.

        Call it before the worker takes runs.
        """
        return _with_client(_skip_late)

    def news(self) -> list[str]:
        """Say which runs of the worker have started or ended since the last call."""
        return _with_client(self._news.look)

    def check(self) -> list[str]:
        """Close runs whose process has died since, resume those that crashed, and skip late ones.

        At last, remind the server of silent runs of offline workers.
        """
        return _with_client(self._check)

    async def _begin(self, client: PrefectClient) -> list[str]:
        closed = [*await close_killed_runs(client), *await close_runs_of_worker(client, self._worker)]
        return [closed_line(each, "lost its worker") for each in closed]

    async def _check(self, client: PrefectClient) -> list[str]:
        cancelled = await self._cancelled_runs.end(client)
        killed = [closed_line(each, "was killed") for each in await close_killed_runs(client)]
        lost = [closed_line(each, "lost its worker") for each in await close_lost_starts(client, self._worker)]
        resumed = [*await restore_lost_runs(client, self._worker), *await _resume_crashed(client, self._worker)]
        skipped = await _skip_late(client)
        await remind_of_silent_runs(client, self._worker)
        return [*cancelled, *killed, *lost, *resumed, *skipped]


def _with_client(work: Callable[[PrefectClient], Awaitable[list[str]]]) -> list[str]:
    async def run() -> list[str]:
        async with get_client() as client:
            return await work(client)

    return asyncio.run(run())


async def _resume_crashed(client: PrefectClient, worker: str) -> list[str]:
    crashed = await client.read_flow_runs(
        flow_run_filter=_CRASHED, work_pool_filter=OF_THE_POOL, sort=FlowRunSort.END_TIME_DESC
    )
    # A run that is alive is ending, or was lost by mistake and is restored at the next check.
    taken = [run for run in crashed if _is_of(worker, run) and not is_alive(run.id)]
    return [line for run in taken if (line := await _resume_or_give_up(client, run)) is not None]


def _is_of(worker: str, run: FlowRun) -> bool:
    """Return whether a crashed run is this worker's to resume. Any may take one that no worker was able to start."""
    if (taken_by := run.labels.get(WORKER_LABEL)) is not None:
        return taken_by == worker
    return run.state is not None and (run.state.message or "").startswith(_NOT_SUBMITTED)


async def _resume_or_give_up(client: PrefectClient, run: FlowRun) -> str | None:
    tag = _last_checkpoint(run.parameters)
    now = (await client.read_flow_run(run.id)).state
    if run.state is None or now is None or now.id != run.state.id:
        return None  # somebody has decided about it in the meantime
    did_start = run.state.message != WHY_OFFLINE
    resumes = _resumes_since(run, tag) + did_start
    what = "was stopped" if is_stop(run.state.message or "") else "crashed"
    if run.deployment_id is None:
        return await _give_up(
            client, run, f"{what}, and its deployment no longer exists", "Start it from another deployment"
        )
    if resumes > MOST_RESUMES:
        return await _give_up(client, run, f"{what} after {MOST_RESUMES} resumes {_since(tag)}", _REMEDY)
    since = f"resume {resumes} of at most {MOST_RESUMES} {_since(tag)}"
    await client.update_flow_run_labels(run.id, {RESUMES_LABEL: resumes, CHECKPOINT_LABEL: tag})
    # Due since it was due first, so that it comes before runs that have waited for it.
    due = run.expected_start_time
    again: State[Any] = Scheduled(name=AWAITING, message=f"It {what}: {since}.", scheduled_time=due)
    answer = await client.set_flow_run_state(run.id, again)
    if answer.status != SetStateStatus.ACCEPT:
        return f"run {name_in(run.name)!r} {what}, but Prefect refuses to resume it: {answer.details}"
    return f"run {name_in(run.name)!r} {what} and will be resumed: {since}"


async def _give_up(client: PrefectClient, run: FlowRun, what: str, remedy: str) -> str:
    await client.update_flow_run_labels(run.id, {RESUMES_LABEL: 0})  # who retries it has removed the cause
    await client.set_flow_run_state(run.id, Crashed(name=NOT_RESUMED, message=f"It {what}. {remedy}."), force=True)
    return f"run {name_in(run.name)!r} {what}: it is not resumed. {remedy}"


def _resumes_since(run: FlowRun, tag: str) -> int:
    """Return how often a run was resumed since the checkpoint ``tag``."""
    resumes = run.labels.get(RESUMES_LABEL)
    is_same = run.labels.get(CHECKPOINT_LABEL) == tag
    return resumes if is_same and isinstance(resumes, int) else 0


def _since(tag: str) -> str:
    return f"since checkpoint {tag}" if tag else "before its first checkpoint"


def _last_checkpoint(parameters: Mapping[str, Any]) -> str:
    """Return the tag of a run's last complete checkpoint; empty if it has none, or its settings cannot be read now."""
    try:
        last = last_complete(RunParameters.of(parameters).spec().run_folder)
    except (T5TrainError, ValidationError, OSError):
        return ""  # the next start names the problem; without a checkpoint in between, few resumes follow
    return last.tag if last else ""


async def _skip_late(client: PrefectClient) -> list[str]:
    is_due = FlowRunFilterNextScheduledStartTime(before_=datetime.now(UTC))
    waiting = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=_WAITING, next_scheduled_start_time=is_due), work_pool_filter=OF_THE_POOL
    )
    return [line for run in waiting if _is_late(run) and (line := await _skip(client, run)) is not None]


def _is_late(run: FlowRun) -> bool:
    due = run.expected_start_time
    is_new = run.auto_scheduled and run.run_count == 0  # one that is resumed or retried was due long ago
    return is_new and due is not None and datetime.now(UTC) - due >= SKIP_AFTER


async def _skip(client: PrefectClient, run: FlowRun) -> str | None:
    try:
        state = (await client.read_flow_run(run.id)).state
    except ObjectNotFound:
        return None  # it has been deleted
    if state is None or not state.is_scheduled():
        return None  # another worker has started it
    was_due = f"was due at {run.expected_start_time:%Y-%m-%d %H:%M} UTC"
    why = f"Skipped, because it {was_due} and could not start within an hour."
    await client.set_flow_run_state(run.id, Cancelled(name="Skipped", message=why), force=True)
    return f"run {run.name!r} of a schedule {was_due} and is skipped"


class _News:
    """What happened to the runs of one worker since the last look. Runs that ended before this object was made are old.

    A run that starts and ends between two looks is reported once, as ended.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._ended = FlowRunFilter(end_time=FlowRunFilterEndTime(after_=datetime.now(UTC)))
        self._told: dict[UUID, UUID] = {}
        """The newest state that was reported, by run."""

    async def look(self, client: PrefectClient) -> list[str]:
        """Return a line for every run of the worker that has started or ended."""
        found = [
            *await runs_of_the_pool(client, StateType.RUNNING),
            *await client.read_flow_runs(flow_run_filter=self._ended, work_pool_filter=OF_THE_POOL),
        ]
        return list(self._lines([run for run in found if run.labels.get(WORKER_LABEL) == self._worker]))

    def _lines(self, runs: list[FlowRun]) -> Iterator[str]:
        for run in runs:
            if run.state is not None and self._told.get(run.id) != run.state.id:
                again = " again" if run.id in self._told else ""
                self._told[run.id] = run.state.id
                yield _news_of(name_in(run.name), run.state, again)


def _news_of(name: str, state: State, again: str) -> str:
    """Return what happened to a run that is running or has ended, with the reason if it did not complete."""
    if state.type == StateType.RUNNING:
        return f"run {name!r} is running{again}"
    if state.type == StateType.COMPLETED:
        return f"run {name!r} completed"
    if is_stop(state.message or ""):
        return f"run {name!r} was stopped by a signal"
    how, why = (state.name or state.type.value).lower(), " ".join((state.message or "").split())
    return f"run {name!r} {how}{f': {why}' if why else ''}"
