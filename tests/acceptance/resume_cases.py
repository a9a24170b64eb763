"""The cases of docs/evidence/resumes.md: what can happen to checkpoints before a run without a shared root is resumed.

A case starts from hosts that lost power while the run was training and have booted again. It has one or both of two
parts: `harm`, which damages files on their disks; and `strikes`, each of which interrupts the resumed run once more.
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
from tests.support.cluster_runs import Started
from tests.support.unshared_runs import NODE_FOLDER, SCRATCH, SLOW, TWO_NODES, UnsharedHosts, await_condition

SEED, NUM_CUTS, LONGEST_SAVE_SECONDS = 6, 10, 0.04
OPTIMIZER_FILE = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
_FILES_OF_A_NODE = 3
"""Weights, the rank's optimizer file, and its sidecar."""
_DAY = 86400
_FILLER = f"{SCRATCH}/filler"

Harm = Callable[[UnsharedHosts], None]
Strike = Callable[[UnsharedHosts, Started], str]
"""Interrupts a run that is training. Returns a detail to show in the table, or an empty string."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    harm: Harm = lambda _hosts: None
    strikes: tuple[Strike, ...] = ()
    repair: Harm = lambda _hosts: None
    """What the user does after the strikes, before the last start."""
    command: str = "train"
    options: tuple[str, ...] = TWO_NODES


def wiped(hosts: UnsharedHosts) -> None:
    """Boot the second node with an empty disk."""
    hosts.cluster.power_cut("node1")
    hosts.cluster.boot("node1", new_disk=True)


def without_optimizer_file(*names: str) -> Harm:
    """Delete the second rank's optimizer file from the newest checkpoint on these hosts."""

    def harm(hosts: UnsharedHosts) -> None:
        tag = hosts.newest()
        for name in names:
            (hosts.checkpoints(name) / tag / OPTIMIZER_FILE).unlink()

    return harm


def flipped(*names: str) -> Harm:
    """Flip a bit of the second rank's optimizer file in the newest checkpoint on these hosts. Size and mtime stay."""

    def harm(hosts: UnsharedHosts) -> None:
        tag = hosts.newest()
        for name in names:
            _flip(hosts.checkpoints(name) / tag / OPTIMIZER_FILE)

    return harm


def _flip(path: Path) -> None:
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def latest_of_rank_0(hosts: UnsharedHosts) -> None:
    """Write DeepSpeed's `latest` on the first node only, with the name of the oldest checkpoint."""
    (hosts.checkpoints("node0") / "latest").write_text(min(hosts.tags("node0")))


def skewed(hosts: UnsharedHosts) -> None:
    """Date the nodes' files to last year and next year, and advance the second node's clock since boot by ten days."""
    for host, days in (("node0", -365), ("node1", 365)):
        for path in hosts.cluster.disk(host, NODE_FOLDER).rglob("*"):
            os.utime(path, times=(time.time() + days * _DAY,) * 2)
    hosts.cluster.stop_sshd("node1")
    ahead = ["unshare", "--time", "--fork", "--monotonic", str(10 * _DAY), "--boottime", str(10 * _DAY)]
    hosts.cluster.exec("node1", [*ahead, *host_files.START]).check_returncode()


def cut_while_saving(host: str, seconds: float) -> Strike:
    """Cut a node's power this long after it begins to save, and boot it again at once."""

    def strike(hosts: UnsharedHosts, run: Started) -> str:
        await_condition(run, lambda: bool(pids(hosts.runner, host, RANK)))
        ranks = pids(hosts.runner, host, RANK)
        tag = hosts.await_saving(run, host)
        time.sleep(seconds)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)  # stops writing now: cutting the power takes longer than a save
        hosts.cluster.power_cut(host)
        written = len(list((hosts.checkpoints(host) / tag).glob("[!.]*")))
        hosts.cluster.boot(host)
        return f"{host} {seconds * 1000:.0f} ms into {tag}, with {written} of {_FILES_OF_A_NODE} files"

    return strike


def cuts() -> tuple[Strike, ...]:
    """Return power cuts at random moments of a save."""
    drawn = random.Random(SEED)
    return tuple(
        cut_while_saving(drawn.choice(["node0", "node1"]), drawn.uniform(0, LONGEST_SAVE_SECONDS))
        for _ in range(NUM_CUTS)
    )


def lost_for_good(hosts: UnsharedHosts, run: Started) -> str:
    """Cut the second node's power as soon as its rank runs, and leave it off."""
    await_condition(run, lambda: bool(pids(hosts.runner, "node1", RANK)))
    hosts.cluster.power_cut("node1")
    return ""


def head_lost_while_gathering(hosts: UnsharedHosts, run: Started) -> str:
    """Cut the head's power when it has gathered part of a new checkpoint, and boot it again at once."""
    gathered = hosts.checkpoints("head")
    await_condition(run, lambda: bool(pids(hosts.runner, "node1", RANK)))
    hosts.await_saving(run)
    hosts.cluster.set_rate("node0", SLOW)
    await_condition(run, lambda: any(path.stat().st_size for path in gathered.glob("step-*/.*.part")))
    hosts.cluster.power_cut("head")
    parts = list(gathered.glob("step-*/.*.part"))
    hosts.cluster.boot("head")
    return f"{sum(path.stat().st_size for path in parts):,} bytes of {parts[0].parent.name} had arrived"


def at_full_speed(hosts: UnsharedHosts) -> None:
    """Remove the bandwidth limit from the first node's network link."""
    hosts.cluster.set_rate("node0", None)


def on_a_small_disk(hosts: UnsharedHosts) -> None:
    """Mount a new disk as the second node's scratch folder, no larger than preflight requires."""
    hosts.cluster.exec(
        "node1", ["mount", "-t", "tmpfs", "-o", "size=1100m,mode=700", "small", SCRATCH]
    ).check_returncode()


def disk_full(hosts: UnsharedHosts, run: Started) -> str:
    """Fill the second node's disk while it trains."""
    await_condition(run, lambda: bool(pids(hosts.runner, "node1", RANK)))
    hosts.cluster.exec("node1", ["dd", "if=/dev/zero", f"of={_FILLER}", "bs=1M"])  # ends when the disk is full
    return ""


def disk_freed(hosts: UnsharedHosts) -> None:
    hosts.cluster.exec("node1", ["rm", _FILLER]).check_returncode()


CASES = [
    Case("all nodes are intact"),
    Case("one node's disk is wiped", wiped),
    Case("an optimizer file of the newest checkpoint is missing on its node", without_optimizer_file("node1")),
    Case(
        "an optimizer file of the newest checkpoint is missing on its node and in the gathered copy",
        without_optimizer_file("node1", "head"),
    ),
    Case("a bit is flipped in an optimizer file on its node", flipped("node1")),
    Case("a bit is flipped in an optimizer file on its node and in the gathered copy", flipped("node1", "head")),
    Case("`latest` is on rank 0's node only, and names the oldest checkpoint", latest_of_rank_0),
    Case("clock skew", skewed),
    Case("the head is restarted while it gathers", strikes=(head_lost_while_gathering,), repair=at_full_speed),
    Case("a node's disk is full when it saves", on_a_small_disk, (disk_full,), disk_freed),
    Case(
        "a node is lost permanently and replaced by a spare",
        strikes=(lost_for_good,),
        command="run",
        options=("--hostfile", HOSTFILE, "--spares", "1"),
    ),
    Case("a node loses power while it saves a checkpoint, ten times in a row", strikes=cuts()),
]
