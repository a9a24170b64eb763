"""What can have happened to checkpoints when a run goes on: the rows of docs/resumes.md, each done for real.

A case begins on hosts that have lost power in the midst of a run and are on again. Of its two halves either may be left
out: harm to what lies on their disks, and strikes, each of which ends the run once more after it was started.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.testcluster import host_files
from infra.testcluster.host_files import HOSTFILE
from tests.acceptance.fault_cases import RANK, pids
from tests.support.apart_runs import NODE_FOLDER, SCRATCH, SLOW, TWO_NODES, Apart, await_truth
from tests.support.cluster_runs import Started

SEED, NUM_CUTS, LONGEST_SAVE_SECONDS = 6, 10, 0.04
SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
_FILES_OF_A_NODE = 3
"""Weights, the rank's shard, and its sidecar."""
_DAY = 86400
_FILLER = f"{SCRATCH}/filler"

Harm = Callable[[Apart], None]
Strike = Callable[[Apart, Started], str]
"""What is done to a run at work, and what is to be told of it besides."""


@dataclass(frozen=True)
class Case:
    """One row."""

    what: str
    harm: Harm = lambda _it: None
    strikes: tuple[Strike, ...] = ()
    mend: Harm = lambda _it: None
    """What the user does after the strikes, before the run is started for the last time."""
    command: str = "train"
    options: tuple[str, ...] = TWO_NODES


def wiped(it: Apart) -> None:
    """Another disk in the second node."""
    it.cluster.power_cut("node1")
    it.cluster.boot("node1", new_disk=True)


def without_shard(*hosts: str) -> Harm:
    """The second rank's shard of the newest checkpoint is gone there."""

    def harm(it: Apart) -> None:
        tag = it.newest()
        for host in hosts:
            (it.checkpoints(host) / tag / SHARD).unlink()

    return harm


def flipped(*hosts: str) -> Harm:
    """A bit of the second rank's shard of the newest checkpoint is another there; the size and the time stay."""

    def harm(it: Apart) -> None:
        tag = it.newest()
        for host in hosts:
            _flip(it.checkpoints(host) / tag / SHARD)

    return harm


def _flip(path: Path) -> None:
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def latest_of_rank_0(it: Apart) -> None:
    """DeepSpeed's file, on the first node alone, and not of the newest checkpoint."""
    (it.checkpoints("node0") / "latest").write_text(min(it.tags("node0")))


def skewed(it: Apart) -> None:
    """Files of the nodes are of last year and of next year; the second node's time since boot is ten days more."""
    for host, days in (("node0", -365), ("node1", 365)):
        for path in it.cluster.disk(host, NODE_FOLDER).rglob("*"):
            os.utime(path, times=(time.time() + days * _DAY,) * 2)
    it.cluster.stop_sshd("node1")
    ahead = ["unshare", "--time", "--fork", "--monotonic", str(10 * _DAY), "--boottime", str(10 * _DAY)]
    it.cluster.exec("node1", [*ahead, *host_files.START]).check_returncode()


def cut_while_saving(host: str, seconds: float) -> Strike:
    """A node loses power so long after it has begun to save, and is on again at once."""

    def strike(it: Apart, run: Started) -> str:
        await_truth(run, lambda: bool(pids(it.stage, host, RANK)))
        ranks = pids(it.stage, host, RANK)
        tag = it.await_saving(run, host)
        time.sleep(seconds)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)  # from now on nothing is written: a power cut takes longer than a save
        it.cluster.power_cut(host)
        written = len(list((it.checkpoints(host) / tag).glob("[!.]*")))
        it.cluster.boot(host)
        return f"{host} {seconds * 1000:.0f} ms into {tag}, with {written} of {_FILES_OF_A_NODE} files"

    return strike


def cuts() -> tuple[Strike, ...]:
    """At moments of a save that were drawn."""
    drawn = random.Random(SEED)
    return tuple(
        cut_while_saving(drawn.choice(["node0", "node1"]), drawn.uniform(0, LONGEST_SAVE_SECONDS))
        for _ in range(NUM_CUTS)
    )


def lost_for_good(it: Apart, run: Started) -> str:
    """The second node, as soon as its rank is there."""
    await_truth(run, lambda: bool(pids(it.stage, "node1", RANK)))
    it.cluster.power_cut("node1")
    return ""


def head_lost_while_gathering(it: Apart, run: Started) -> str:
    """It is off as soon as some of a new checkpoint has come to it, and on again at once."""
    gathered = it.checkpoints("head")
    await_truth(run, lambda: bool(pids(it.stage, "node1", RANK)))
    it.await_saving(run)
    it.cluster.set_rate("node0", SLOW)
    await_truth(run, lambda: any(path.stat().st_size for path in gathered.glob("step-*/.*.part")))
    it.cluster.power_cut("head")
    parts = list(gathered.glob("step-*/.*.part"))
    it.cluster.boot("head")
    return f"{sum(path.stat().st_size for path in parts):,} bytes of {parts[0].parent.name} had come"


def at_full_speed(it: Apart) -> None:
    """The first node's cable is as it was."""
    it.cluster.set_rate("node0", None)


def on_a_small_disk(it: Apart) -> None:
    """The second node's scratch folder is a disk of its own, new and no larger than preflight asks for."""
    it.cluster.exec("node1", ["mount", "-t", "tmpfs", "-o", "size=1100m,mode=700", "small", SCRATCH]).check_returncode()


def disk_full(it: Apart, run: Started) -> str:
    """Somebody fills the second node's disk while it trains."""
    await_truth(run, lambda: bool(pids(it.stage, "node1", RANK)))
    it.cluster.exec("node1", ["dd", "if=/dev/zero", f"of={_FILLER}", "bs=1M"])  # ends when there is no more room
    return ""


def room_again(it: Apart) -> None:
    """What filled the disk is removed."""
    it.cluster.exec("node1", ["rm", _FILLER]).check_returncode()


CASES = [
    Case("all nodes are intact"),
    Case("one node's disk is wiped", wiped),
    Case("a shard of the newest checkpoint is missing on its node", without_shard("node1")),
    Case(
        "a shard of the newest checkpoint is missing on its node and in the gathered copy",
        without_shard("node1", "head"),
    ),
    Case("a bit is flipped in a shard on its node", flipped("node1")),
    Case("a bit is flipped in a shard on its node and in the gathered copy", flipped("node1", "head")),
    Case("`latest` is on rank 0's node alone, and names the oldest", latest_of_rank_0),
    Case("clock skew", skewed),
    Case("the head is restarted while it gathers", strikes=(head_lost_while_gathering,), mend=at_full_speed),
    Case("the disk of a node is full when it saves", on_a_small_disk, (disk_full,), room_again),
    Case(
        "a node is lost for good, and replaced by a spare",
        strikes=(lost_for_good,),
        command="run",
        options=("--hostfile", HOSTFILE, "--spares", "1"),
    ),
    Case("a tag is half written: ten times in a row a node loses power while it saves", strikes=cuts()),
]
