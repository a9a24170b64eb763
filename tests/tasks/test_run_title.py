"""The title of a run's page: the run's name, and behind it what the run is doing, in every attempt."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.context import FlowRunContext

from tasks import run_title
from tasks.run_title import show_in_title


class Server:
    """Keeps the name of one flow run, as Prefect's server does; also the client that changes it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def set_flow_run_name(self, _flow_run_id: str, name: str) -> None:
        self.name = name

    @contextmanager
    def client(self, **_options: Any) -> Any:
        yield self

    def begin_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the process be one that has just read the flow run from the server."""
        context = SimpleNamespace(flow_run=SimpleNamespace(id="1", name=self.name))
        monkeypatch.setattr(FlowRunContext, "get", lambda: context)


def test_a_second_attempt_does_not_show_why_the_first_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("quick-lemur: The process of this run ended before the run did.")
    monkeypatch.setattr(run_title, "get_client", server.client)
    server.begin_attempt(monkeypatch)
    show_in_title("Make the data")
    assert server.name == "quick-lemur: Make the data"
    show_in_title("Make the data failed: the disk is full")
    server.begin_attempt(monkeypatch)
    show_in_title(None)
    assert server.name == "quick-lemur"
