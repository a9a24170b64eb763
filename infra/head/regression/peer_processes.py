"""The processes of the peer: started once for a case, idle while the case runs, and timed before and after it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from infra.node.attempts.rank_environment import allowed, search_path
from infra.node.ports import free_port
from t5train.errors import RegressionError
from t5train.host_resources import num_cores
from t5train.progress import Progress

_ADDRESS = "127.0.0.1"
_END_SECONDS = 20.0
WARM_UP_STEPS = 10


class PeerJob(NamedTuple):
    """What the peer trains: the fields of t5train.regression.peer_loop.PeerJob, which imports torch."""

    config: dict[str, Any]
    sequences: int
    input_tokens: int
    target_tokens: int


class StepTimes(NamedTuple):
    """Wall time and CPU time of each step, on rank 0."""

    seconds: list[float]
    cpu_seconds: list[float]


class _Rank(NamedTuple):
    process: subprocess.Popen[bytes]
    orders: TextIO
    answers: TextIO


class Peer:
    """The running ranks of the peer."""

    def __init__(self, ranks: list[_Rank], log: Path) -> None:
        self._ranks, self._log = ranks, log

    def timed(self, steps: int) -> StepTimes:
        """Let the peer take steps; return the times of each on rank 0. Raises RegressionError if a rank has ended."""
        try:
            for rank in self._ranks:
                rank.orders.write(f"{steps}\n")
                rank.orders.flush()
            line = self._ranks[0].answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RegressionError(f"the peer ended: read its output in {self._log}, then start the night again")
        return StepTimes(**json.loads(line))


@contextmanager
def running_peer(job: PeerJob, num_ranks: int, folder: Path, progress: Progress) -> Iterator[Peer]:
    """Start the peer's ranks and let them warm up; they end with the block.

    Each rank computes with its share of the cores, as the ranks of a case do. ``folder`` gets ``peer.log``, the output
    of all ranks.
    """
    progress("peers started", 0, 1)
    port = free_port()
    with ExitStack() as stack:
        log = stack.enter_context(open(folder / "peer.log", "ab"))
        peer = Peer(
            [stack.enter_context(_rank(job, rank, num_ranks, port, log)) for rank in range(num_ranks)],
            folder / "peer.log",
        )
        peer.timed(WARM_UP_STEPS)
        progress("peers started", 1, 1)
        yield peer


@contextmanager
def _rank(job: PeerJob, rank: int, num_ranks: int, port: int, log: IO[bytes]) -> Iterator[_Rank]:
    """Start a rank. It ends when its standard input does, so also if this process is killed."""
    number = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port)}
    (stdin, orders), (answers, stdout) = os.pipe(), os.pipe()
    with open(orders, "w", encoding="utf-8") as ordering, open(answers, encoding="utf-8") as answering:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "t5train.regression.peer_loop", json.dumps(job._asdict())],
                env=_environment(num_ranks) | number,
                stdin=stdin,
                stdout=stdout,
                stderr=log,
            )
        finally:
            os.close(stdin)
            os.close(stdout)
        try:
            yield _Rank(process, ordering, answering)
        finally:
            ordering.close()
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment(num_ranks: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)),
        **allowed(os.environ),
        "PATH": search_path(),
        "OMP_WAIT_POLICY": "PASSIVE",  # otherwise, waiting threads take CPU time on a busy machine
        "PYTHONSAFEPATH": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "MASTER_ADDR": _ADDRESS,
    }
