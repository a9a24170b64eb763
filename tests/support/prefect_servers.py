"""Prefect servers for tests, as processes of their own, and their clients."""

import json
import os
import shutil
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from flows.server.prefect_server import answers
from infra.node.ports import free_port

SERVE = """
import sys
from pathlib import Path
from flows.server.prefect_server import own_server
from t5train.progress import silent

with own_server(Path(sys.argv[1]), int(sys.argv[2]), silent, lasting=True) as api_url:
    print(api_url, flush=True)
    sys.stdin.read()
"""
PROGRAM = """
from flows.cli import __main__

__main__.main()
"""
QUICK_SCHEDULER = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2"}
"""How often a server looks for schedules that lack runs. By default, it takes a minute to see a new schedule."""
HOSTILE = {
    "PREFECT_FLOWS_DEFAULT_RETRIES": "2",
    "PREFECT_FLOWS_DEFAULT_RETRY_DELAY_SECONDS": "600",
    "PREFECT_TASKS_DEFAULT_RETRIES": "3",
    "PREFECT_TASKS_DEFAULT_RETRY_DELAY_SECONDS": "600",
    "PREFECT_TASKS_DEFAULT_PERSIST_RESULT": "true",
    "PREFECT_TASKS_REFRESH_CACHE": "true",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK": "s3/missing",
    "PREFECT_LOGGING_LOG_PRINTS": "true",
}
"""Settings that a user may have for other flows, and that must not change ours."""
BUSY_SECONDS = 60.0
ANSWER_SECONDS = 120.0
"""Longer than a server waits for a lock on its SQLite database, which is 60 s: it answers then that it is busy."""


def start(home: Path, current: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server with its state in ``home``; returns its process and API URL. It ends when its stdin is closed."""
    command = [sys.executable, "-P", "-c", SERVE, str(home), str(free_port())]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=current, env=os.environ | QUICK_SCHEDULER, **pipes)
    assert process.stdout is not None
    api_url = process.stdout.readline().strip()
    assert api_url, f"no server: {(home / 'server.log').read_text()}"
    return process, api_url


@contextmanager
def running(home: Path, current: Path) -> Iterator[str]:
    """A server that ends with the block; yields its API URL."""
    process, api_url = start(home, current)
    with process:
        yield api_url
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    assert not answers(api_url)


def make_database(path: Path) -> None:
    """Let a server create its database, and move that to a path."""
    with TemporaryDirectory() as folder:
        home = Path(folder, "prefect")
        with running(home, Path(folder)):
            pass
        shutil.move(home / "prefect.db", path)


def client_environment(home: Path, api_url: str) -> dict[str, str]:
    """The environment of a user's shell that has the server's URL, but not its key."""
    return os.environ | {"PREFECT_HOME": str(home.parent / "user"), "PREFECT_API_URL": api_url, "DO_NOT_TRACK": "1"}


def ask(home: Path, url: str, body: object, method: str = "POST", expected: int | None = None) -> Any:
    """The answer of the server in a home, to a client that has the key; ``expected`` is its status, by default 2xx.

    As Prefect's client does, it repeats a request that the server was too busy for (503).
    """
    deadline = time.monotonic() + BUSY_SECONDS
    status, content = _answer(home, url, body, method)
    while status == HTTPStatus.SERVICE_UNAVAILABLE and time.monotonic() < deadline:
        time.sleep(1)
        status, content = _answer(home, url, body, method)
    is_expected = status == expected if expected else status < HTTPStatus.MULTIPLE_CHOICES
    assert is_expected, (status, content)
    return json.loads(content) if content else None


def _answer(home: Path, url: str, body: object, method: str) -> tuple[int, bytes]:
    key = b64encode((home / "api-key").read_text().strip().encode()).decode()
    headers = {"content-type": "application/json", "Authorization": f"Basic {key}"}
    server = urlsplit(url)
    with closing(HTTPConnection(str(server.hostname), server.port, timeout=ANSWER_SECONDS)) as connection:
        connection.request("GET", "/api/csrf-token?client=test", headers=headers)
        response = connection.getresponse()
        token = response.read()
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return response.status, token
        headers |= {"Prefect-Csrf-Token": json.loads(token)["token"], "Prefect-Csrf-Client": "test"}
        connection.request(method, f"{server.path}?{server.query}", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
