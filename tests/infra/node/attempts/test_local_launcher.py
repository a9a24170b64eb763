import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

from infra.node.attempts.local_launcher import variables_of

RANKS = 2


@pytest.mark.slow
def test_ranks_get_the_variables_that_deepspeeds_launcher_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.launcher import launch  # imports torch

    given = list[Mapping[str, str]]()

    class Ended:
        pid, returncode = 1, 0

        def __init__(self, _argv: list[str], env: Mapping[str, str]) -> None:
            given.append(dict(env))

        def poll(self) -> int:
            return 0

    for name in variables_of(0, RANKS, 29500):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch.subprocess, "Popen", Ended)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    world = "eyJsb2NhbGhvc3QiOiBbMCwgMV19"  # {"localhost": [0, 1]}
    own = set(launch.os.environ)
    monkeypatch.setattr(sys, "argv", ["", f"--world_info={world}", "--master_port=29500", "--no_local_rank", "program"])
    launch.main()
    added = [{name: value for name, value in environment.items() if name not in own} for environment in given]
    assert added == [variables_of(rank, RANKS, 29500) for rank in range(RANKS)]


STOPPED_WHILE_IT_STARTS = """
import os, signal, subprocess, sys
from infra.node.attempts import local_launcher

class Guard(subprocess.Popen):
    def __init__(self, _argv, env):
        super().__init__(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print("started", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Guard
sys.exit(local_launcher.launch(2, 29500, []))
"""


def test_a_signal_while_guards_are_started_ends_those_that_are_and_starts_no_others() -> None:
    command = [sys.executable, "-c", STOPPED_WHILE_IT_STARTS]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "started\n"), ended.stderr
