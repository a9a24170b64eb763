"""Runs this node's ranks of preflight's all-reduce, and ends them at a deadline.

``python -m infra.node.inspection.all_reduce`` is one rank. On stdout, it reports each stage that it reaches, one word
per line; if it fails, the word ``failed`` and the reason. It gets its rank and rendezvous from torch's variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and its accelerator from DS_ACCELERATOR and SLOT.
"""

import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import IO, TYPE_CHECKING

from infra.node import processes
from infra.node.attempts.rank_environment import search_path
from infra.node.messages import Query
from infra.node.ports import Endpoint
from infra.node.processes import RUN_ID_VARIABLE, Survivors

if TYPE_CHECKING:
    import torch


class Stage(StrEnum):
    """The stages of a rank, in the order in which it reaches them."""

    STARTED = "started"
    REACHED = "reached"
    """The machine of the rendezvous answers."""
    IMPORTED = "imported"
    """Torch is imported."""
    JOINED = "joined"
    """All ranks have joined."""
    EXCHANGED = "exchanged"
    """A sum of one number is done, whose messages fit into small packets."""
    SUMMED = "summed"


STAGES = tuple(Stage)
FAILED = "failed"
SLOT = "T5_PREFLIGHT_SLOT"
_ELEMENTS = 1 << 18
_CONNECT_SECONDS = 5.0
# ``probe`` ends the ranks at its deadline. With a timeout here, ranks that only waited could fail first.
_NEVER = timedelta(days=1)
_ANSWERED = {0, errno.ECONNREFUSED}  # the machine answered, even if rank 0 is not listening yet


def main() -> int:
    """Run one rank: join the others, sum, and check the sum. Returns the exit code."""
    _say(Stage.STARTED)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if problem := unreachable(address, port):
        return _fail(
            f"the rendezvous at {address}, port {port}, cannot be reached: {problem}. Check routes and firewalls"
        )
    _say(Stage.REACHED)
    try:
        importlib.import_module("torch.distributed")
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        return _fail(f"torch cannot be imported: {error}. Repair the installation there")
    _say(Stage.IMPORTED)
    try:
        problem = _join_and_sum(_device())
    except (RuntimeError, ValueError, OSError) as error:  # collectives raise these if other ranks cannot be reached
        problem = f"{type(error).__name__}: {error}"
    return _fail(problem) if problem else 0


def unreachable(address: str, port: int) -> str:
    """Why the machine at an address does not answer; empty if it does, even if nothing listens on that port yet."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_SECONDS)
        try:
            number = sock.connect_ex((address, port))
        except TimeoutError:
            number = errno.ETIMEDOUT
    # connect_ex returns EAGAIN when it times out.
    number = errno.ETIMEDOUT if number == errno.EAGAIN else number
    return "" if number in _ANSWERED else os.strerror(number)


def _device() -> "torch.device":
    import torch

    slot = int(os.environ[SLOT])
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(slot)
    return torch.device(found.type, slot)


def _join_and_sum(device: "torch.device") -> str:
    """Join the other ranks and sum; returns what is wrong with the result, empty if it is correct."""
    import torch.distributed as dist

    dist.init_process_group(dist.get_default_backend_for_device(device), init_method="env://", timeout=_NEVER)
    _say(Stage.JOINED)
    problem = _sum(device, 1)
    if not problem:
        _say(Stage.EXCHANGED)
        problem = _sum(device, _ELEMENTS)
    if not problem:
        _say(Stage.SUMMED)
    dist.destroy_process_group()
    return problem


def _sum(device: "torch.device", elements: int) -> str:
    """Sum a tensor of equal numbers over all ranks; sums of small integers are exact in fp32.

    Returns what is wrong, or empty.
    """
    import torch
    import torch.distributed as dist

    values = torch.full((elements,), _share(dist.get_rank()), dtype=torch.float32, device=device)
    dist.all_reduce(values)
    right = sum(map(_share, range(dist.get_world_size())))
    low, high = values.min().item(), values.max().item()
    return (
        ""
        if low == high == right
        else f"the all-reduce sum is {low:g} to {high:g}, not {right:g}. Suspect accelerators, drivers or network"
    )


def _share(rank: int) -> float:
    return float(rank % 7 + 1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _fail(problem: str) -> int:
    _say(f"{FAILED} {' '.join(problem.split())}")
    return 1


_LOOK_SECONDS = 0.05
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


@dataclass(frozen=True)
class RankProbe:
    """How far a rank got."""

    rank: int
    stage: Stage
    error: str
    """Why it failed, or its last line on stderr."""
    returncode: int | None
    """Its exit code; None if it was ended at the deadline, or because another rank on this node failed."""


@dataclass(frozen=True)
class Probed:
    """How far the ranks of a node got."""

    ranks: tuple[RankProbe, ...]


@dataclass(frozen=True)
class Probe(Query[Probed]):
    """Run a rank for each of ``slots``, numbered from ``first_rank``, for at most ``deadline_seconds``."""

    action = "probe"
    run_id: str
    rendezvous: Endpoint
    interface: str
    """The network interface that leads to the rendezvous."""
    num_ranks: int
    """Number of ranks on all nodes together."""
    first_rank: int
    slots: tuple[int, ...]
    accelerator: str | None
    environment: Mapping[str, str]
    deadline_seconds: float


def probe(request: Probe) -> Probed:
    """Run the ranks until all have ended, one has failed, or the deadline has passed, then end the rest."""
    with ExitStack() as started:
        ranks = [started.enter_context(_started(request, index)) for index in range(len(request.slots))]
        codes = _returncodes([rank.process for rank in ranks], request.deadline_seconds)
        for rank in ranks:
            rank.process.kill()
        return Probed(tuple(_outcome(rank, code) for rank, code in zip(ranks, codes, strict=True)))


def _returncodes(running: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Wait until all processes have ended or one has failed, for a time at most. None: it is still running."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        if any(codes) or None not in codes:
            break
        time.sleep(_LOOK_SECONDS)
    return [process.poll() for process in running]


@dataclass(frozen=True)
class EndProbe(Query[Survivors]):
    """End the ranks of a probe, so that its action returns."""

    action = "end_probe"
    run_id: str


def end_probe(request: EndProbe) -> Survivors:
    """End the ranks."""
    return Survivors(tuple(sorted(processes.end(processes.in_run(request.run_id), grace_seconds=0))))


@contextmanager
def _started(request: Probe, index: int) -> Iterator[_Rank]:
    """Start a rank, which is killed at the end of the block."""
    number = request.first_rank + index
    environment = {
        **os.environ,
        "PATH": search_path(),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": request.interface,
        "NCCL_SOCKET_IFNAME": request.interface,
        **request.environment,
        **({} if request.accelerator is None else {"DS_ACCELERATOR": request.accelerator}),
        RUN_ID_VARIABLE: request.run_id,
        "RANK": str(number),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(request.num_ranks),
        "MASTER_ADDR": request.rendezvous.address,
        "MASTER_PORT": str(request.rendezvous.port),
        SLOT: str(request.slots[index]),
    }
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "infra.node.inspection.all_reduce"],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            # preexec_fn is unsafe only beside threads. A node has a process for each action, and this one starts none.
            preexec_fn=partial(processes.die_with_parent, signal.SIGKILL),  # noqa: PLW1509 - no threads here
        )
        try:
            yield _Rank(number, process, stdout, stderr)
        finally:
            process.kill()


def _outcome(rank: _Rank, returncode: int | None) -> RankProbe:
    rank.process.wait()
    lines = _lines(rank.stdout)
    stages = [line for line in lines if line in STAGES]
    failures = [line.removeprefix(FAILED).strip() for line in lines if line.startswith(FAILED)]
    stage = Stage(stages[-1]) if stages else Stage.STARTED
    return RankProbe(rank.number, stage, (failures or _lines(rank.stderr) or [""])[-1], returncode)


def _lines(file: IO[bytes]) -> list[str]:
    """The lines in the last 4096 bytes of a file, without empty ones."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
