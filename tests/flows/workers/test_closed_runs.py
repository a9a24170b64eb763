"""What is said of a run whose process has ended: Prefect shows it as cancelled, or as crashed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.workers import run_records
from flows.workers.abandoned import WORKER_LABEL, close_run, close_runs_of_worker, closed_line
from flows.workers.run_monitor import CHECKPOINT_LABEL, MOST_RESUMES, NOT_RESUMED, RESUMES_LABEL, _resume_or_give_up


class Client:
    """Stands in for Prefect's client; keeps the last state that a run was set to."""

    state: State[Any]

    async def read_flow_run(self, _id: object) -> SimpleNamespace:
        return SimpleNamespace(state=self.state)

    async def update_flow_run_labels(self, _id: object, _labels: object) -> None:
        """Keep no labels."""

    async def set_flow_run_state(self, _id: object, state: State[Any], *, force: bool) -> None:
        assert force
        self.state = state

    async def set_flow_run_name(self, _id: object, _name: str) -> None:
        """Rename nothing."""


@pytest.mark.parametrize(
    ("before", "after", "message", "line"),
    [
        (
            StateType.CANCELLING,
            StateType.CANCELLED,
            "This run was cancelled, and its process has ended.",
            "run 'mine' was cancelled and is now closed in Prefect",
        ),
        (
            StateType.RUNNING,
            StateType.CRASHED,
            "The process of this run ended before the run did.",
            "run 'mine' was killed and is now closed in Prefect; start the same run again to resume it",
        ),
    ],
)
def test_a_cancelled_run_is_not_called_killed(before: StateType, after: StateType, message: str, line: str) -> None:
    client, run = Client(), SimpleNamespace(id=1, name="mine", state_type=before, deployment_id=None)
    closed = asyncio.run(close_run(cast(PrefectClient, client), cast(FlowRun, run)))
    assert closed_line(closed, "was killed") == line
    assert (client.state.type, client.state.message) == (after, message)


def test_a_run_that_completes_while_the_server_is_asked_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(id=UUID(int=1), name="mine", labels={WORKER_LABEL: "t5@gpu1"}, state_type=StateType.RUNNING)
    alive = {run.id}

    def living(_: Path) -> set[UUID]:
        return set(alive)

    class Server(Client):
        async def read_flow_runs(self, **_: object) -> list[SimpleNamespace]:
            alive.clear()  # it completes just after this was read
            return [run]

    monkeypatch.setattr(run_records, "living", living)
    assert asyncio.run(close_runs_of_worker(cast(PrefectClient, Server()), "t5@gpu1")) == []


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("Execution was aborted by a termination signal.", "was stopped"),
        ("The process of this run ended before the run did.", "crashed"),
    ],
)
@pytest.mark.parametrize("deployment", [None, "of the run"])
def test_a_run_that_is_not_resumed_is_said_to_have_crashed_only_if_it_did(
    message: str, what: str, deployment: str | None
) -> None:
    client = Client()
    client.state = State(type=StateType.CRASHED, message=message)
    labels = {RESUMES_LABEL: MOST_RESUMES, CHECKPOINT_LABEL: ""}
    run = SimpleNamespace(id=1, name="mine", state=client.state, parameters={}, labels=labels, deployment_id=deployment)
    line = asyncio.run(_resume_or_give_up(cast(PrefectClient, client), cast(FlowRun, run)))
    why = "after 3 resumes before its first checkpoint" if deployment else "and its deployment no longer exists"
    separator = " " if deployment else ", "
    assert line is not None
    assert line.startswith(f"run 'mine' {what}{separator}{why}: it is not resumed")
    assert client.state.name == NOT_RESUMED
    assert (client.state.message or "").startswith(f"It {what}{separator}{why}. ")
