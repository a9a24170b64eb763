"""The ranks of the all-reduce on this node: started, given a time, and ended."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from infra import processes
from infra.environment import search_path
from infra.preflight.probe_rank import FAILED, SLOT, STAGES, STARTED
from infra.processes import RUN_ID_VARIABLE

_LOOK_SECONDS = 0.05
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


def probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a rank for each of ``slots``, the first with number ``first_rank``, for ``deadline_seconds`` at most.

    Returns how far each came, by its number: ``{"3": {"stage": "met", "said": "", "returncode": -9}}``, without the
    return code where the rank was ended because its time was over or another one here had failed.
    """
    deadline = time.monotonic() + request["deadline_seconds"]
    ranks = [_start(request, index) for index in range(len(request["slots"]))]
    try:
        while time.monotonic() < deadline:
            codes = [rank.process.poll() for rank in ranks]
            if any(codes) or None not in codes:
                break
            time.sleep(_LOOK_SECONDS)
        codes = [rank.process.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
    return {str(rank.number): _outcome(rank) | {"returncode": code} for rank, code in zip(ranks, codes, strict=True)}


def end_probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """End the ranks of a probe, whose ``probe`` then returns."""
    return {"left": sorted(processes.end(processes.in_run(request["run_id"]), grace_seconds=0))}


def _start(request: Mapping[str, Any], index: int) -> _Rank:
    number, slots = request["first_rank"] + index, request["slots"]
    environment = {
        **os.environ,
        "PATH": search_path(),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": request["interface"],
        "NCCL_SOCKET_IFNAME": request["interface"],
        **request["environment"],
        **({} if request["accelerator"] is None else {"DS_ACCELERATOR": request["accelerator"]}),
        RUN_ID_VARIABLE: request["run_id"],
        "RANK": str(number),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(request["num_ranks"]),
        "MASTER_ADDR": request["address"],
        "MASTER_PORT": str(request["port"]),
        SLOT: str(slots[index]),
    }
    stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the rank
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.preflight.probe_rank"],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        preexec_fn=partial(processes.die_with_parent, signal.SIGKILL),  # noqa: PLW1509 - unsafe with threads only, and there are none
    )
    return _Rank(number, process, stdout, stderr)


def _outcome(rank: _Rank) -> dict[str, Any]:
    rank.process.wait()
    with rank.stdout as stdout, rank.stderr as stderr:
        lines = _lines(stdout)
        stages = [line for line in lines if line in STAGES]
        failures = [line.removeprefix(FAILED).strip() for line in lines if line.startswith(FAILED)]
        return {"stage": stages[-1] if stages else STARTED, "said": (failures or _lines(stderr) or [""])[-1]}


def _lines(file: IO[bytes]) -> list[str]:
    """Those near the end of a file that say something."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
