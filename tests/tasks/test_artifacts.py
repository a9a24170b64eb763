"""Artifacts show texts as they are, although Prefect's pages read descriptions and the cells of tables as Markdown."""

import json
from contextlib import contextmanager
from typing import Any

import pytest

from tasks import artifacts
from tasks.artifacts import shown_table

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

    monkeypatch.setattr(artifacts, "create_table_artifact", create)
    monkeypatch.setattr(artifacts, "get_client", client)
    table = shown_table("hosts")
    for _ in range(2):
        table.show(ROWS, "of <host>")
    assert stored == [(ESCAPED, r"of \<host>"), (json.dumps(ESCAPED), r"of \<host>")]
