"""``up``: whatever ends it, its server and its worker end too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.prefect_server import free_port

STUBBORN = """
import os, signal, threading, time
from flows import work
work.STOP_SECONDS = work.LOOK_SECONDS = 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=work.end_after, args=(os.getppid(),), daemon=True).start()
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
def test_up_ends_in_order_when_a_service_manager_stops_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from flows.cli import main; main()", "up"]
    command += ["--root", str(tmp_path), "--port", str(free_port())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert "deployed" in up.stdout.readline()
        assert "Prefect is at" in up.stdout.readline()
        server_and_worker = children(up.pid)
        assert len(server_and_worker) == 2
        time.sleep(5)  # until the worker has signal handlers of its own
        up.terminate()
        assert up.wait(60) == 128 + signal.SIGINT
        assert all(is_gone(pid, 1) for pid in server_and_worker)
