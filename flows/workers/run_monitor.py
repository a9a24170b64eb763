"""The run monitor, which works beside a worker: it closes abandoned runs, ends cancelled ones that are still alive,
resumes crashed ones, and checks waiting ones.

A run that crashed is scheduled again, on the machine where it crashed, because its files may be there only. The state
in Prefect says what is still to be decided: each run whose state is named Crashed or Lost is either scheduled again or,
after too many crashes without a new checkpoint, gets the state NotResumed. Nothing else resumes a run, and runs that
failed or were cancelled are in other states. Runs that are Lost by mistake get their state back first. Of runs of other
machines, the monitor only marks those as Lost that are silent.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Crashed, Scheduled
from pydantic import ValidationError

from flows.run_parameters import RunParameters
from flows.workers.abandoned import (
    AWAITING,
    OF_THE_POOL,
    WHY_OFFLINE,
    WORKER_LABEL,
    close_abandoned_runs,
    close_lost_starts,
    close_runs_of_worker,
    closed_line,
    is_alive,
)
from flows.workers.cancelled_runs import CancelledRuns
from flows.workers.lost_runs import LOST, SilentRuns, restore_lost_runs
from flows.workers.run_news import RunNews
from flows.workers.waiting_runs import WaitingRuns
from t5train.checkpoint.resume_point import last_complete
from t5train.errors import T5TrainError
from tasks.prefect_log import is_stop
from tasks.run_title import name_in

MOST_RESUMES = 3
"""How many times in a row a run is resumed without a new complete checkpoint in between."""

NOT_RESUMED = "NotResumed"
"""Name of the state of a crashed run that is not resumed."""

RESUMES_LABEL, CHECKPOINT_LABEL = "t5-pretrain.resumes", "t5-pretrain.checkpoint"
"""Labels of a flow run: how often it was resumed since its last checkpoint, and the tag of that checkpoint."""

_REMEDY = "Its log and its folder attempts/ show why. Fix the cause, then choose Retry in Prefect"
_NOT_SUBMITTED = "Failed to submit flow run to infrastructure"
"""How Prefect's worker begins the message of a run that it could not start, such as for a server that was busy."""
_CRASHED = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Crashed", LOST])))


class RunMonitor:
    """Closes and resumes the runs of one worker. Methods return lines that say what was done."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._waiting_runs, self._cancelled_runs = WaitingRuns(worker), CancelledRuns(worker)
        self._silent_runs, self._news = SilentRuns(worker), RunNews(worker)

    def begin(self) -> list[str]:
        """Close what the previous worker left. Call it before the worker starts."""
        closed = [*close_abandoned_runs(), *close_runs_of_worker(self._worker)]
        return [closed_line(each, "lost its worker") for each in closed]

    def check_waiting(self) -> list[str]:
        """Refuse waiting runs with wrong settings, and skip late ones. Call it before the worker takes runs."""
        return self._waiting_runs.check()

    def news(self) -> list[str]:
        """Say which runs of the worker have started or ended since the last call."""
        return asyncio.run(self._news.look())

    def check(self) -> list[str]:
        """Close runs whose process has died since, resume those that crashed, and check those that wait.

        At last, mark silent runs of offline workers as Lost.
        """
        cancelled = asyncio.run(self._cancelled_runs.end())
        killed = [closed_line(each, "was killed") for each in close_abandoned_runs()]
        lost = [closed_line(each, "lost its worker") for each in close_lost_starts(self._worker)]
        resumed = asyncio.run(_restore_and_resume(self._worker))
        waiting = self._waiting_runs.check()
        return [*cancelled, *killed, *lost, *resumed, *waiting, *asyncio.run(self._silent_runs.look())]


async def _restore_and_resume(worker: str) -> list[str]:
    return [*await restore_lost_runs(worker), *await _resume_crashed(worker)]


async def _resume_crashed(worker: str) -> list[str]:
    async with get_client() as client:
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
