"""What is said of a run whose process has ended: Prefect shows it as cancelled, or as crashed."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows.workers.abandoned import close_run, closed_line


class Client:
    """Stands in for Prefect's client; keeps the last state that a run was set to."""

    state: State[Any]

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
