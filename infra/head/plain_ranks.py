"""Runs ranks of another program than training on this machine, without the guards of a run, and leaves none behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from infra.head.stop_signal import undisturbed
from infra.node import operator_folder
from infra.node.attempts.rank_environment import allowed, search_path
from infra.node.ports import free_port
from t5train.errors import LaunchError, OutOfMemory
from t5train.train.trainer_benchmark import OUT_OF_MEMORY

_POLL_SECONDS, _GRACE_SECONDS = 0.2, 3.0
_SHOWN_CHARACTERS = 3000
# Becomes the rank, which the kernel then kills when the thread that started it ends: also if this process is killed.
# A preexec_fn could deadlock, as there are other threads.
_PR_SET_PDEATHSIG = 1
_START = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    accelerator: str | None,
    logs: Path,
    on_tick: Callable[[], object] = lambda: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run Python with these arguments once for every rank, wait until all have ended, and call ``on_tick`` meanwhile.

    Ranks get the variables that those of a run may have, and ``environment``. Each writes to ``logs/rank-N.log``. If
    one fails, the others are killed. Raises OutOfMemory if a rank ended with that exit code, otherwise a LaunchError
    with the end of the log of the rank that failed first.
    """
    logs.mkdir(parents=True, exist_ok=True)
    common = {**allowed(os.environ), **rank_variables(ranks, accelerator), **environment}
    with _killed_at_the_end() as processes:
        for rank in range(ranks):
            # A signal between the start of a process and its place in the list would leave the process behind.
            with open(logs / f"rank-{rank}.log", "wb") as log, undisturbed("starting a rank"):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), sys.executable, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                    )
                )
        _await(processes, logs, on_tick)


def rank_variables(ranks: int, accelerator: str | None) -> Mapping[str, str]:
    """Return the environment variables that all ranks share."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": search_path(os.environ),
        operator_folder.VARIABLE: str(operator_folder.operator_folder(os.environ)),
        **({} if accelerator is None else {"DS_ACCELERATOR": accelerator}),
    }


def _await(processes: Sequence[subprocess.Popen[bytes]], logs: Path, on_tick: Callable[[], object]) -> None:
    while True:
        codes = [process.poll() for process in processes]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            break
        if None not in codes:
            return
        on_tick()
        time.sleep(_POLL_SECONDS)
    # The others may fail only because of the first. Wait a little, as one of them may know of a lack of memory.
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
    first = failed[0]
    log = logs / f"rank-{first}.log"
    if OUT_OF_MEMORY in [process.returncode for process in processes]:
        raise OutOfMemory(f"a rank ran out of memory: see {logs}. Use a smaller micro-batch")
    end = log.read_text("utf-8", "replace")[-_SHOWN_CHARACTERS:]
    raise LaunchError(f"rank {first} ended with exit code {processes[first].returncode}. The end of {log}:\n{end}")


@contextmanager
def _killed_at_the_end() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Kill what is left of the processes, each with its own children, such as those that compile kernels."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
