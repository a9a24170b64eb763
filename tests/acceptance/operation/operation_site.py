"""A team's Prefect on a test cluster: a server, a head with a worker, and two hosts that train, all of them separate.

``Site.tick`` does what systemd would do: it starts the server and the worker again when they have ended.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from flows.deployment.definitions import POOL
from infra.node import processes
from infra.node.processes import ProcessIdentity
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME
from infra.testcluster.namespaces import HEAD
from t5train.files.run_folder import ATTEMPTS
from tests.support.cluster_runs import ENVIRONMENT, SETTINGS, last_step, prepare

NODES, SERVER = ("node0", "node1"), "node2"
SERVER_ROOT, PORT = f"{HOME}/team", 4200
DATABASE = f"{SERVER_ROOT}/server/prefect.db"
RESTART_SECONDS = {SERVER: 5.0, HEAD: 10.0}
"""RestartSec of the units in deployments/systemd."""
SLOW = "4mbit"
"""The network link of a training host: slow enough that training goes on for minutes."""
RUN_SETTINGS = {
    "optimizer.num_steps": 240,
    "storage.checkpoint_every_steps": 10,
    "storage.validate_every_steps": 240,
    "cluster.lease_seconds": 10,
    "cluster.grace_seconds": 5,
    "cluster.retries": 0,
}
_CLIENT = """
import json, sys
from http.client import HTTPException
from pathlib import Path
from tests.support.prefect_servers import ask

for line in sys.stdin:
    try:
        answer = ask(Path(sys.argv[1]), **json.loads(line))
    except (OSError, HTTPException, AssertionError) as error:
        answer = {"unanswered": repr(error)}
    print(json.dumps(answer), flush=True)
"""
_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
_START_SECONDS = 300.0
_LOOK_SECONDS = 0.3


class ServerError(Exception):
    """The server does not answer, or refuses."""


class Shown(NamedTuple):
    state_type: str
    state_name: str
    attempt: int


@dataclass
class Site:
    """The hosts, and what has been started on them."""

    cluster: Cluster
    root: Path
    _client: subprocess.Popen[str]
    _services: dict[str, subprocess.Popen[bytes] | float]
    """For each host its service, or since when it has ended."""
    _options: list[str]
    """Hosts and settings of every run."""

    @classmethod
    @contextmanager
    def up(cls, root: Path, **changed: object) -> Iterator[Self]:
        """Boot the cluster, start server and worker, and deploy with RUN_SETTINGS, updated with ``changed``.

        ``root`` is the folder that all hosts share.
        """
        prepare(root)
        (root / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES), "utf-8")
        services: dict[str, subprocess.Popen[bytes] | float] = {}
        try:
            with (
                Cluster.temporary(f"operation-{os.getpid()}", nodes=3, share=root) as cluster,
                _client(cluster) as client,
            ):
                settings = [f"--set={name}={value}" for name, value in {**SETTINGS, **RUN_SETTINGS, **changed}.items()]
                options = ["--root", str(root), "--hostfile", str(root / "hosts"), *settings]
                site = cls(cluster, root, client, services, options)
                site.start(SERVER)
                site.await_that(site.answers)
                site.call("deploy", *options)
                site.start(HEAD)
                yield site
        finally:
            for service in services.values():  # they ended with their hosts
                if not isinstance(service, float):
                    service.wait()

    def start(self, host: str) -> None:
        """Start the server or the worker, on its host, where it must have ended."""
        last = self._services.get(host)
        if isinstance(last, subprocess.Popen):
            last.wait()
        if host == SERVER:
            argv = ["server", "--root", SERVER_ROOT, "--host", self.cluster.address(SERVER), "--port", str(PORT)]
        else:
            argv = ["worker", "--root", str(self.root)]
        with open(self.root / f"{argv[0]}.log", "ab") as log:
            more = self.client_environment() if host == HEAD else None
            self._services[host] = self.cluster.start(host, ["t5-pretrain", *argv], log, more)

    def tick(self) -> None:
        """Start services again that have ended, after the time that systemd would wait."""
        for host, service in self._services.items():
            if self.cluster.host(host).init is None:
                continue  # switched off
            if isinstance(service, float):
                if time.monotonic() > service + RESTART_SECONDS[host]:
                    self.start(host)
            elif service.poll() is not None:
                self._services[host] = time.monotonic()

    def power_cycle_head(self, off_seconds: float) -> None:
        """Cut the head's power, and boot it again. Its worker starts by itself."""
        self.cluster.power_cut(HEAD)
        time.sleep(off_seconds)
        self.cluster.boot(HEAD)
        self.start(HEAD)

    def client_environment(self) -> Mapping[str, str]:
        key = self.cluster.disk(SERVER, f"{SERVER_ROOT}/server/api-key").read_text().strip()
        url = f"http://{self.cluster.address(SERVER)}:{PORT}/api"
        return ENVIRONMENT | {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": key}

    def call(self, *argv: str) -> None:
        """Run ``t5-pretrain`` on the head. Raises AssertionError with its errors if it fails."""
        result = self.cluster.exec(HEAD, ["t5-pretrain", *argv], self.client_environment(), timeout=_START_SECONDS)
        assert result.returncode == 0, result.stderr

    def train(self, name: str) -> None:
        """Train a run on the two hosts with what is deployed, but without Prefect."""
        self.call("train", "smoke", "--name", name, *self._options)

    def ask(self, path: str, body: object = None, method: str = "POST") -> Any:
        """Ask the server's API, on the server's own host. Raises ServerError if it does not answer."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        url = f"http://{self.cluster.address(SERVER)}:{PORT}/api/{path}"
        self._client.stdin.write(json.dumps({"url": url, "body": body or {}, "method": method}) + "\n")
        self._client.stdin.flush()
        answer = json.loads(self._client.stdout.readline())
        if isinstance(answer, dict) and "unanswered" in answer:
            raise ServerError(answer["unanswered"])
        return answer

    def answers(self) -> bool:
        try:
            self.ask("flows/count")
        except ServerError:
            return False
        return True

    def start_run(self, name: str) -> str:
        """Start a run of deployment ``smoke`` on the two hosts, as from the UI; returns its id."""
        (smoke,) = self.ask("deployments/filter", {"deployments": {"name": {"any_": ["smoke"]}}})
        return str(self.ask(f"deployments/{smoke['id']}/create_flow_run", {"parameters": {"run_name": name}})["id"])

    def shown(self, run: str) -> Shown:
        """What Prefect shows of a run. Raises ServerError if the server does not answer."""
        found = self.ask(f"flow_runs/{run}", method="GET")
        return Shown(found["state_type"], found["state_name"], found["run_count"])

    def occupying(self) -> set[str]:
        """The runs that occupy a slot of a queue."""
        states = {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}
        pool = {"name": {"any_": [POOL]}}
        return {
            each["id"] for each in self.ask("flow_runs/filter", {"flow_runs": {"state": states}, "work_pools": pool})
        }

    def step(self, name: str) -> int:
        return last_step(self.root / "runs" / name)

    def attempts(self, name: str) -> int:
        return len([*(self.root / "runs" / name / ATTEMPTS).glob("*/attempt.json")])

    def flow(self, run: str) -> ProcessIdentity | None:
        """The process that executes a run: the first of those that carry its id."""
        found = _identities(processes.find(lambda pid: processes.variable(pid, _RUN_VARIABLE) == run))
        return min(found, key=lambda process: process.start_time, default=None)

    def of_run(self, run: str) -> set[ProcessIdentity]:
        """All processes of a run, on the head and on the hosts that train."""
        there = {process.pid for node in NODES for process in self.cluster.processes(node) if _is_ours(process.argv)}
        return _identities(there | processes.find(lambda pid: processes.variable(pid, _RUN_VARIABLE) == run))

    def kill(self, host: str, *arguments: str) -> None:
        """Kill the first process on a host that has all of these arguments. Raises AssertionError if there is none."""
        found = [each.pid for each in self.cluster.processes(host) if {*arguments} <= {Path(a).name for a in each.argv}]
        assert found, f"no process with {arguments} on {host}"
        os.kill(found[0], signal.SIGKILL)

    def await_that(self, condition: Any, seconds: float = _START_SECONDS) -> None:
        """Wait for a condition. Raises AssertionError after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, condition
            self.tick()
            time.sleep(_LOOK_SECONDS)


@contextmanager
def _client(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """A process on the server's host that asks the server."""
    command = ["env", f"PYTHONPATH={Path(__file__).parents[3]}", sys.executable, "-c", _CLIENT, f"{SERVER_ROOT}/server"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(cluster.host(SERVER).command(command), **pipes) as client:
        try:
            yield client
        finally:
            client.kill()


@contextmanager
def shared_folder(kept: Path | None) -> Iterator[Path]:
    """Yield the folder that all hosts will share: ``kept``, or a temporary one."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _is_ours(argv: tuple[str, ...]) -> bool:
    return not Path(argv[0].partition(":")[0]).name.startswith("sshd")


def _identities(pids: set[int]) -> set[ProcessIdentity]:
    found = set()
    for pid in pids:
        try:
            found.add(ProcessIdentity.of(pid))
        except ProcessLookupError:  # it has just ended
            continue
    return found
