"""``up``: whatever ends it, its server and its worker end too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flows.prefect_server import free_port

STUBBORN = """
import os, signal, threading, time
from flows import worker
worker.STOP_SECONDS = worker.LOOK_SECONDS = 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=worker.end_after, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.1)
    return False


def test_a_worker_that_no_signal_ends_is_killed_after_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, STUBBORN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGTERM)
        assert not is_gone(worker, 1)
        parent.kill()
        assert is_gone(worker, 10)


@pytest.mark.slow
def test_up_ends_in_order_when_a_service_manager_stops_it(up: Any, tmp_path: Path) -> None:
    with up(tmp_path, free_port()) as process:
        assert process.stdout is not None
        assert "Prefect is at" in process.stdout.readline()
        server_and_worker = children(process.pid)
        assert len(server_and_worker) == 2
        time.sleep(5)  # until the worker has signal handlers of its own
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGINT
        assert all(is_gone(pid, 1) for pid in server_and_worker)


@pytest.mark.slow
def test_runs_that_lost_their_worker_or_their_process_are_closed(
    up: Any, ask: Any, flow_process: Any, tmp_path: Path
) -> None:
    port, home = free_port(), tmp_path / "prefect"
    api_url = f"http://127.0.0.1:{port}/api"
    with up(tmp_path, port) as process:
        assert process.stdout is not None
        assert "Prefect is at" in process.stdout.readline()
        deployment = ask(home, f"{api_url}/deployments/filter", {})[0]
        run = ask(home, f"{api_url}/deployments/{deployment['id']}/create_flow_run", {"state": {"type": "RUNNING"}})
        process.kill()
    with up(tmp_path, port) as process:
        assert process.stdout is not None
        assert f"run {run['name']!r} lost its worker" in process.stdout.readline()
        (found,) = ask(home, f"{api_url}/flow_runs/filter", _with_id(run["id"]))
        assert found["state_type"] == "CRASHED"
        client, killed = flow_process(home, api_url)
        client.kill()
        deadline = time.monotonic() + 90  # it is looked for every ten seconds
        while ask(home, f"{api_url}/flow_runs/filter", _with_id(killed))[0]["state_type"] != "CRASHED":
            assert time.monotonic() < deadline
            time.sleep(0.5)


def _with_id(run: str) -> dict[str, object]:
    return {"flow_runs": {"id": {"any_": [run]}}}
