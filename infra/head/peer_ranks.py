"""Runs the ranks of a peer on this machine, without any of the guards of a run, and leaves none of them behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.head.stop_signal import undisturbed
from infra.node import operator_folder
from infra.node.attempts.rank_environment import search_path
from infra.node.ports import free_port
from t5train.errors import LaunchError, OutOfMemory
from t5train.train.peer_job import OUT_OF_MEMORY, PeerJob, PeerMeasured

_POLL_SECONDS, _GRACE_SECONDS = 0.2, 3.0
_SHOWN_CHARACTERS = 3000


def measure_peer(job: PeerJob, folder: Path) -> PeerMeasured:
    """Let a peer take its steps. ``folder`` is for the job, the result and logs.

    Raises OutOfMemory if a rank ran out of memory, otherwise LaunchError if one failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, cluster = folder / "job.json", job.spec.cluster
    path.write_text(job.model_dump_json(), "utf-8")
    run_ranks(("-m", "t5train.train.peer_step", str(path)), cluster.ranks, cluster.accelerator, folder)
    return PeerMeasured.model_validate_json(path.with_name("measured.json").read_text("utf-8"))


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    accelerator: str | None,
    logs: Path,
    on_tick: Callable[[], object] = lambda: None,
) -> None:
    """Run Python with these arguments once for every rank, wait until all have ended, and call ``on_tick`` meanwhile.

    Each rank writes to ``logs/rank-N.log``. If one fails, the others are killed. Raises OutOfMemory if a rank ended
    with that exit code, otherwise a LaunchError with the end of the log of the rank that failed first.
    """
    logs.mkdir(parents=True, exist_ok=True)
    common = rank_variables(ranks, accelerator)
    with _killed_at_the_end() as processes:
        for rank in range(ranks):
            # A signal between the start of a process and its place in the list would leave the process behind.
            with open(logs / f"rank-{rank}.log", "wb") as log, undisturbed("starting a rank"):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
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
