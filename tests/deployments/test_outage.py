"""A worker outlives its server: Prefect's own ends after minutes without one, and kills its runs."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from tests.support.team_servers import Team
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "0.2", "PREFECT_CLIENT_MAX_RETRIES": "0"}
"""A worker that asks often, and once: Prefect's client repeats a request for a minute."""
ENOUGH = 30
"""Far more than it takes: Prefect's own worker exits after 12 failed requests, or when its key is rejected once."""


class Relay(ThreadingTCPServer):
    """Forwards connections to a server, and counts those that find none, and refusals of the key."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.port, self.in_vain, self.refused = port, 0, 0


class _Forward(StreamRequestHandler):
    server: Relay

    def handle(self) -> None:
        try:
            connection = socket.create_connection(("127.0.0.1", self.server.port))
        except ConnectionRefusedError:
            self.server.in_vain += 1
            return
        with connection:
            answers = threading.Thread(target=self._forward, args=(connection, self.connection))
            answers.start()
            self._forward(self.connection, connection)
            answers.join()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                self.server.refused += content.startswith(b"HTTP/1.1 401")
                target.sendall(content)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay_to() -> Iterator[Callable[[int], Relay]]:
    """Starts a relay to a port of this machine."""
    with ExitStack() as stack:

        def start(port: int) -> Relay:
            relay = stack.enter_context(Relay(port))
            threading.Thread(target=relay.serve_forever, args=(0.05,)).start()
            stack.callback(relay.shutdown)
            return relay

        yield start


def test_a_worker_outlives_a_server_that_is_away_or_refuses_its_key_and_workers_take_runs_one_by_one(
    tmp_path: Path, relay_to: Callable[[int], Relay], new_home: Callable[[Path], Path]
) -> None:
    team = Team(tmp_path, None)
    new_home(team.home)
    relay = relay_to(team.port)
    said = tmp_path / "worker.log"
    with ExitStack() as stack:
        with team.running():
            team.call("deploy", "--root", str(tmp_path))
            api = {"PREFECT_API_URL": f"http://127.0.0.1:{relay.server_address[1]}/api"}
            worker = stack.enter_context(_worker(team.client | QUICK | api, said))
            await_that(lambda: team.ask("work_pools/t5-pretrain/workers/filter", {}) != [])
        asked = relay.in_vain
        await_that(lambda: worker.poll() is not None or relay.in_vain >= asked + ENOUGH)
        assert worker.poll() is None, "the server was away"
        key = team.home / "api-key"
        given = key.read_text()
        key.unlink()
        with team.running():
            assert key.read_text() != given
            await_that(lambda: worker.poll() is not None or relay.refused >= ENOUGH)
            assert worker.poll() is None, "the server refused its key"
        key.write_text(given)
        with team.running():
            await_that(lambda: "serves this worker again" in said.read_text())
            worker.kill()
            stack.enter_context(_worker(team.client, tmp_path / "second.log"))
            queue = team.ask("work_queues/filter", {"work_queues": {"name": {"any_": ["training"]}}})[0]
            team.ask(f"work_queues/{queue['id']}", {"concurrency_limit": 2}, method="PATCH")
            wrong = {"recipe": "smoke", "root": str(tmp_path), "steps": 1}  # fewer steps than its warm-up
            runs = [team.start("SCHEDULED", parameters=wrong) for _ in range(2)]
            await_that(lambda: all(team.run(run)["state_type"] == "FAILED" for run in runs))
            first, second = sorted(map(team.run, runs), key=lambda run: run["start_time"])
            assert first["end_time"] <= second["start_time"], "one at a time, although the queue allows two"
    reported = re.findall("runs go on without it|serves this worker again", said.read_text())
    # Once each; again if the server was busy.
    assert all(report != before for before, report in pairwise(["serves this worker again", *reported]))


@contextmanager
def _worker(environment: dict[str, str], said: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "flows.workers.worker", "t5-pretrain", "t5@gpu1"]
    with open(said, "wb") as log, subprocess.Popen(command, env=environment, cwd="/", stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()
