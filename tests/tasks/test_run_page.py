"""The page of a run: its title, in every attempt, and artifacts that show texts as they are.

Prefect's pages read descriptions and the cells of tables as Markdown.
"""

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.context import FlowRunContext

from tasks import run_page
from tasks.run_page import show_in_title, shown_table

ROWS = [{"folder": "/data/*/_a_", "bytes": 5}]
ESCAPED = [{"folder": r"/data/\*/\_a\_", "bytes": 5}]


def test_descriptions_and_cells_are_escaped_when_an_artifact_is_created_and_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[Any] = []

    class Client:
        def request(self, _method: str, _path: str, *, json: dict[str, Any], path_params: dict[str, Any]) -> None:
            assert path_params == {"id": 1}
            stored.append((json["data"], json["description"]))

    @contextmanager
    def client(**_options: object) -> Any:
        yield Client()

    def create(rows: Any, _key: str, description: str) -> int:
        stored.append((rows, description))
        return 1

    monkeypatch.setattr(run_page, "create_table_artifact", create)
    monkeypatch.setattr(run_page, "get_client", client)
    table = shown_table("hosts")
    for _ in range(2):
        table.show(ROWS, "of <host>")
    assert stored == [(ESCAPED, r"of \<host>"), (json.dumps(ESCAPED), r"of \<host>")]


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
    monkeypatch.setattr(run_page, "get_client", server.client)
    server.begin_attempt(monkeypatch)
    show_in_title("Make the data")
    assert server.name == "quick-lemur: Make the data"
    show_in_title("Make the data failed: the disk is full")
    server.begin_attempt(monkeypatch)
    show_in_title(None)
    assert server.name == "quick-lemur"
