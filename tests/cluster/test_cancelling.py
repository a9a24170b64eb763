"""A run over several hosts saves and can resume after it is cancelled in Prefect or `t5-pretrain up` is stopped."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.node.node_folders import node_path
from infra.testcluster.host_files import HOSTFILE
from t5train.files import heartbeat
from tests.support.cluster_runs import ENVIRONMENT, SETTINGS, ClusterRunner, last_step
from tests.support.prefect_servers import PROGRAM

pytestmark = pytest.mark.cluster

URL = "http://127.0.0.1:4200/api"
NAME = "cancelled"
SECONDS = 400.0  # ample, in case the machine is busy
CANCEL_SECONDS, SAVED_SECONDS = 30.0, 5.0
"""How long after a run was cancelled its processes may run on nodes, and how long after a save that takes longer."""
LONG = {"optimizer.num_steps": 1_000_000, "storage.checkpoint_every_steps": 1_000_000}
ON_TWO_HOSTS = {"cluster.hostfile": HOSTFILE, "cluster.num_nodes": 2, "storage.validate_every_steps": 1_000_000}
API_CLIENT = """
import json, sys
from pathlib import Path
from tests.support import prefect_servers
home, url, method, body = sys.argv[1:]
print(json.dumps(prefect_servers.ask(Path(home), url, json.loads(body), method)))
"""
# In one process, as each takes a second to start.
AWAIT_STATE = """
import sys, time
from pathlib import Path
from tests.support import prefect_servers
home, url, state, seconds = sys.argv[1:]
deadline = time.monotonic() + float(seconds)
while (found := prefect_servers.ask(Path(home), url, None, "GET")["state_type"]) != state:
    assert time.monotonic() < deadline, found
    time.sleep(0.3)
"""


class Prefect:
    """The Prefect server and worker on the head, and a client on the head that sends the requests of a browser."""

    def __init__(self, runner: ClusterRunner) -> None:
        """Start the server and the worker."""
        self._runner, self._log = runner, runner.root / "up.log"
        with open(self._log, "wb") as output:
            argv = ["python", "-c", PROGRAM, "up", "--root", str(runner.root)]
            self._process = runner.cluster.start("head", argv, output.fileno(), ENVIRONMENT)

    def await_start(self) -> None:
        self._await(lambda: "To start a run, type" in self._log.read_text("utf-8"))

    def end(self) -> None:
        """Stop the server and the worker, as a service manager does."""
        for process in self._runner.cluster.processes("head"):
            if "up" in process.argv:
                os.kill(process.pid, signal.SIGTERM)
        self._process.wait(120)

    def run(self) -> str:
        """Start a run of the deployment and return its id."""
        (deployment,) = (each for each in self.ask("deployments/filter", {}) if each["name"] == "smoke")
        parameters = {"run_name": NAME, "settings": {**SETTINGS, **LONG, **ON_TWO_HOSTS}}
        return str(self.ask(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})["id"])

    def cancel(self, run: str) -> None:
        """Send the request that the cancel button on a run's page sends."""
        self.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False})

    def await_state(self, run: str, state: str) -> None:
        url = f"{URL}/flow_runs/{run}"
        argv = ["python", "-c", AWAIT_STATE, str(self._runner.root / "prefect"), url, state, str(SECONDS)]
        awaited = self._runner.cluster.exec("head", argv, timeout=2 * SECONDS)
        assert awaited.returncode == 0, awaited.stderr

    def await_step(self, run_folder: Path, step: int) -> None:
        self._await(lambda: last_step(run_folder) >= step)

    def ask(self, path: str, body: dict[str, object] | None = None) -> Any:
        """Return the API's answer to a GET, or to a POST if there is a ``body``."""
        method = "GET" if body is None else "POST"
        home = str(self._runner.root / "prefect")
        argv = ["python", "-c", API_CLIENT, home, f"{URL}/{path}", method, json.dumps(body)]
        answer = self._runner.cluster.exec("head", argv, timeout=300)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self._log.read_text("utf-8")
            time.sleep(0.3)


@pytest.fixture
def prefect(runner: ClusterRunner) -> Iterator[Prefect]:
    prefect = Prefect(runner)
    try:
        prefect.await_start()
        yield prefect
    finally:
        prefect.end()


def await_end_on_nodes(runner: ClusterRunner) -> None:
    """Wait until no process is left on any node. Raises AssertionError if that takes longer than promised."""
    cancelled_at = time.monotonic()
    deadline = cancelled_at + CANCEL_SECONDS
    while left := [found for found in runner.processes() if found[0] != "head"]:
        now = time.monotonic()
        if is_saving(runner):
            deadline = max(deadline, now + SAVED_SECONDS)
        assert now < deadline, f"{now - cancelled_at:.1f} s after the run was cancelled, these are left: {left}"
        time.sleep(0.1)


def is_saving(runner: ClusterRunner) -> bool:
    """Whether a rank is saving a checkpoint."""
    disks = (runner.cluster.disk(node, f"{node_path()}/attempts") for node in runner.cluster.nodes)
    beats = (heartbeat.read(path) for disk in disks for path in disk.glob("*/rank-*.beat"))
    return any(beat is not None and beat.is_saving for beat in beats)


def test_a_run_that_is_cancelled_or_whose_worker_stops_saves_ends_everywhere_and_resumes(
    prefect: Prefect, runner: ClusterRunner
) -> None:
    folder = runner.root / "runs" / NAME
    first = prefect.run()
    prefect.await_step(folder, 5)
    prefect.cancel(first)
    await_end_on_nodes(runner)
    prefect.await_state(first, "CANCELLED")
    saved = last_step(folder)
    assert (folder / "checkpoints" / f"step-{saved:08d}").is_dir()
    prefect.run()
    prefect.await_step(folder, saved + 5)
    second = json.loads((folder / "attempts" / "0002" / "spec.json").read_text("utf-8"))
    assert second["resume_tag"] == f"step-{saved:08d}"
    prefect.end()
    assert not runner.left()
    assert (folder / "checkpoints" / f"step-{last_step(folder):08d}").is_dir()
