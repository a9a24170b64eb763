"""A team's server on a private PostgreSQL, as its systemd unit starts it, for tests."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from flows.server.prefect_server import LATE_VARIABLE
from flows.server.team_server import DATABASE_VARIABLE
from infra.node.ports import free_port
from tests.support import prefect_servers
from tests.support.waiting import await_that

UNITS = Path(__file__).parents[2] / "deployments" / "systemd"
BIN = str(Path(sys.executable).parent)
HIDDEN = "p@ss/word-of-the-database"


def exec_start(unit: str, **replaced: str) -> list[str]:
    """The command of a unit, with this environment's program in place of the one in /opt/t5-pretrain."""
    (line,) = re.findall("^ExecStart=(.*)$", (UNITS / f"t5-pretrain-{unit}.service").read_text(), re.MULTILINE)
    for old, new in {"/opt/t5-pretrain/.venv/bin": BIN, **replaced}.items():
        assert old in line
        line = line.replace(old, new)
    return shlex.split(line)


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | more


@contextmanager
def postgresql() -> Iterator[Callable[[str], str]]:
    """A private PostgreSQL on a loopback port. Returns the URL of a database of user t5 with the given password."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb"), shutil.which("initdb")]
    if found[0] is None:
        # `make test` runs .ci/postgresql first, which installs it. Only a user who may not install packages gets here.
        pytest.skip("no PostgreSQL to test the team server with: apt-get install postgresql")
    programs, port = Path(found[0]).parent, free_port()
    user: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    # In its user's own home: that user can't enter a TMPDIR that is private to root, as .ci/run's is.
    folder = Path(tempfile.mkdtemp(prefix="t5-pretrain-", dir=Path("~postgres").expanduser() if user else None))
    if user:
        shutil.chown(folder, "postgres")
    initdb = [programs / "initdb", "--pgdata", folder / "data", "--username=postgres", "--auth-host=scram-sha-256"]
    subprocess.run([*initdb, "--no-sync", "--locale=C.UTF-8"], cwd=folder, check=True, capture_output=True, **user)
    options = [f"-cport={port}", "-clisten_addresses=127.0.0.1", f"-cunix_socket_directories={folder}", "-cfsync=off"]
    server = subprocess.Popen([programs / "postgres", "-D", folder / "data", *options], cwd=folder, **user)
    try:
        ready = [programs / "pg_isready", "--host", folder, "--port", str(port)]
        await_that(lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)
        psql = [programs / "psql", "--host", folder, "--port", str(port), "--username=postgres", "--quiet"]
        for command in (f"CREATE ROLE t5 LOGIN PASSWORD '{HIDDEN}'", "CREATE DATABASE prefect OWNER t5"):
            subprocess.run([*psql, f"--command={command}"], check=True, **user)
        yield lambda password: f"postgresql+asyncpg://t5:{quote(password, safe='')}@127.0.0.1:{port}/prefect"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
        shutil.rmtree(folder)


class Team:
    """A team's server in a folder, what clients know of it, and requests to it."""

    def __init__(self, root: Path, database: str | None) -> None:
        self.root, self.port, self._database = root, free_port(), database
        self.home, self.api_url = root / "server", f"http://127.0.0.1:{self.port}/api"
        self.scheduled_after_restart: list[dict[str, Any]] = []
        """The scheduled runs that the restarted server knew at once; deleting a schedule deletes them."""

    @property
    def command(self) -> list[str]:
        replaced = {"/var/lib/t5-pretrain-server": str(self.root), "4200": str(self.port)}
        _, *arguments = exec_start("server", **replaced)
        return [sys.executable, "-c", prefect_servers.PROGRAM, *arguments]

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The server, which a service manager stops at the end."""
        database = {DATABASE_VARIABLE: self._database} if self._database else {}
        settings = environment(**database, **prefect_servers.QUICK_SCHEDULER, **{LATE_VARIABLE: "1"})
        with subprocess.Popen(self.command, env=settings, cwd="/", stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline().startswith(f"Prefect is at http://127.0.0.1:{self.port}")
            try:
                yield server
            finally:
                server.terminate()
            assert server.wait(120) == 128 + signal.SIGINT

    @property
    def client(self) -> dict[str, str]:
        """The environment of a client on another machine."""
        key = (self.home / "api-key").read_text().strip()
        home = str(self.root / "user")
        return environment(PREFECT_API_URL=self.api_url, PREFECT_API_AUTH_STRING=key, PREFECT_HOME=home)

    def call(self, *arguments: str, **more: str) -> str:
        """Run ``t5-pretrain`` as a client."""
        command = [f"{BIN}/t5-pretrain", *arguments]
        result = subprocess.run(command, env=self.client | more, cwd="/", capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def ask(self, path: str, body: object, method: str = "POST") -> Any:
        return prefect_servers.ask(self.home, f"{self.api_url}/{path}", body, method)

    def get(self, path: str) -> str:
        """The response to a request that only reads."""
        key = b64encode((self.home / "api-key").read_text().strip().encode()).decode()
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=prefect_servers.ANSWER_SECONDS)) as connection:
            connection.request("GET", f"/api/{path}", headers={"Authorization": f"Basic {key}"})
            return connection.getresponse().read().decode()

    def scheduled(self) -> list[dict[str, Any]]:
        """The runs that are scheduled."""
        return list(self.ask("flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}))

    def start(self, state: str, **more: object) -> str:
        """Create a run of the deployment ``smoke`` in a state, and return its id."""
        (smoke,) = self.ask("deployments/filter", {"deployments": {"name": {"any_": ["smoke"]}}})
        return str(self.ask(f"deployments/{smoke['id']}/create_flow_run", {"state": {"type": state}, **more})["id"])

    def set_state(self, run: str, state: str, message: str = "", name: str | None = None) -> None:
        wanted = {"type": state, "name": name, "message": message}
        self.ask(f"flow_runs/{run}/set_state", {"state": wanted, "force": True})

    def run(self, run: str) -> dict[str, Any]:
        (found,) = self.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return dict(found)


@contextmanager
def worker(team: Team, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The worker of this machine, until it is killed or the block ends. Keywords are added to its environment."""
    settings = team.client | more
    process = subprocess.Popen(exec_start("worker"), env=settings, cwd="/", stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            was_running = process.poll() is None
            process.terminate()
        assert not was_running or process.wait(120) == 128 + signal.SIGINT
