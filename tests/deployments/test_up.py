"""However ``up`` ends, its server and its worker end too."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flows.workers.abandoned import WORKER_LABEL
from flows.workers.run_monitor import CHECKPOINT_LABEL, MOST_RESUMES, RESUMES_LABEL
from flows.workers.run_records import worker_name
from infra.node.ports import free_port

STUBBORN = """
import os, signal, threading, time
from flows.workers import worker
worker.STOP_SECONDS = worker.LOOK_SECONDS = 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=worker.end_after, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def catches(pid: int, number: int) -> bool:
    (caught,) = re.findall(r"SigCgt:\s(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False


def test_a_worker_that_ignores_sigterm_is_killed_after_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, STUBBORN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGTERM)
        assert not is_gone(worker, 1)
        parent.kill()
        assert is_gone(worker, 300)


class SecondUp(NamedTuple):
    """A second ``up`` on a root, after the first one was killed during a run of its pool."""

    process: subprocess.Popen[str]
    first_line: str
    """The first line that it prints after the one about deployments."""
    run: dict[str, Any]
    """The run, as Prefect recorded it before the kill."""
    api_url: str
    home: Path


@pytest.fixture(scope="module")
def second_up(
    up: Any, ask: Any, new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecondUp]:
    root, port = tmp_path_factory.mktemp("up"), free_port()
    api_url, home = f"http://127.0.0.1:{port}/api", new_home(root / "prefect")
    with up(root, port) as process:
        assert process.stdout is not None
        assert "Prefect is at" in process.stdout.readline()
        deployment = ask(home, f"{api_url}/deployments/filter", {})[0]
        # Its worker took it, and it has been resumed as often as it may be.
        labels = {WORKER_LABEL: worker_name(), RESUMES_LABEL: MOST_RESUMES, CHECKPOINT_LABEL: ""}
        taken: dict[str, object] = {"state": {"type": "RUNNING"}, "labels": labels}
        run = ask(home, f"{api_url}/deployments/{deployment['id']}/create_flow_run", taken)
        process.kill()
    with up(root, port) as process:
        assert process.stdout is not None
        yield SecondUp(process, process.stdout.readline(), run, api_url, home)


@pytest.mark.slow
def test_runs_that_lost_their_worker_or_their_process_are_closed_and_sigterm_ends_server_and_worker(
    second_up: SecondUp, ask: Any, flow_process: Any
) -> None:
    assert f"run {second_up.run['name']!r} lost its worker" in second_up.first_line
    runs = f"{second_up.api_url}/flow_runs/filter"
    (found,) = ask(second_up.home, runs, _with_id(second_up.run["id"]))
    assert found["state_type"] == "CRASHED"
    client, killed = flow_process(second_up.home, second_up.api_url)
    client.kill()
    deadline = time.monotonic() + 300  # the check runs every ten seconds
    while ask(second_up.home, runs, _with_id(killed))[0]["state_type"] != "CRASHED":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    # In the same test, because it ends this server.
    assert second_up.process.stdout is not None
    assert "Prefect is at" in second_up.process.stdout.readline()
    server_and_worker = children(second_up.process.pid)
    assert len(server_and_worker) == 2
    deadline = time.monotonic() + 300
    while not all(catches(pid, signal.SIGTERM) for pid in server_and_worker):
        assert time.monotonic() < deadline, "server or worker has no signal handler of its own"
        time.sleep(0.1)
    second_up.process.terminate()
    assert second_up.process.wait(300) == 128 + signal.SIGINT
    assert all(is_gone(pid, 300) for pid in server_and_worker)


def _with_id(run: str) -> dict[str, object]:
    return {"flow_runs": {"id": {"any_": [run]}}}
