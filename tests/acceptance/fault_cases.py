"""The faults of docs/evidence/faults.md, each injected into a real run on a test cluster.

A fault has one or both of two parts: `wrong`, a context manager that breaks something before the run starts and repairs
it after the run has ended; and `strike`, which breaks something once the run is training.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

from infra.head.stop_signal import SAME_STOP_SECONDS
from infra.node import node_folders
from infra.testcluster import Cluster, host_files
from infra.testcluster.host_files import HOME, HOSTFILE
from t5train.errors import DiskFull, LaunchError, PreflightError, SpecError
from tests.support.cluster_runs import ClusterRunner, Started

LEASE_SECONDS = 10
_AGAIN_SECONDS = SAME_STOP_SECONDS + 0.2  # sooner, it would count as the same
MASTER_PORT = 29555
SECRET = "s3cr3t-f0r-n0b0dy"  # noqa: S105 - a made-up secret
QUOTED = """it's "quoted" $(touch executed) `touch executed`; touch executed #"""
RANK, LAUNCHER, PDSH, HEAD = "t5train.train", "deepspeed.launcher.runner", "pdsh", "t5-pretrain"
AGENT = "infra.node"
_SILENT_SECONDS, _FROZEN_SECONDS, _SOON_SECONDS = 6, 20, 1
NODE1 = ("node1",)
UNSHARED = "unshared"
_SCRATCH = str(node_folders.node_path() / "scratch")
_INODES = 2000

Strike = Callable[[ClusterRunner, Started], None]
Wrong = Callable[[ClusterRunner], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    message: str
    """A regular expression that the command's error message must match."""
    strike: Strike | None = None
    moment: Strike | None = None
    """Waits for the moment to strike; None: the run has taken some steps."""
    wrong: Wrong = lambda _stage: nullcontext()
    exit_code: int = LaunchError.exit_code
    blames: tuple[str, ...] | None = None
    """The hosts that the one failure that the run records must count against; None: its record is not checked."""
    command: str = "train"
    """``run`` repeats a failed attempt."""
    settings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    """The run's root, relative to the shared folder."""
    started_again: bool = False
    """Whether the command is started again at once; it must then continue the run that is still training."""
    in_ci: bool = False

    @property
    def ends_ranks(self) -> bool:
        """Whether ranks are running when the fault happens, and must end because of it."""
        return self.strike is not None and self.exit_code != 0

    @property
    def run(self) -> str:
        """The run's name. Faults that preflight refuses share one run, because it never starts."""
        refused = self.strike is None and self.exit_code != 0
        return "refused" if refused else re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")


def signalled(host: str, program: str, number: signal.Signals) -> Strike:
    """Send a signal to one of the run's programs on a host."""

    def strike(runner: ClusterRunner, _: Started) -> None:
        signal_all(runner, host, program, number)

    return strike


def signal_all(runner: ClusterRunner, host: str, program: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a program on a host. Raises AssertionError if there are none."""
    found = pids(runner, host, program)
    assert found, f"no {program} on {host}: {runner.cluster.processes(host)}"
    for pid in found:
        os.kill(pid, number)


def pids(runner: ClusterRunner, host: str, program: str) -> list[int]:
    """Return the process ids of one of the run's programs on a host, found by file or module name, without guards."""
    found = []
    for process in runner.cluster.processes(host):
        names = {Path(argument).name for argument in process.argv[:3]}
        if program in names and "infra.node.attempts.process_guard" not in names:
            found.append(process.pid)
    return found


def interrupted_twice(runner: ClusterRunner, started: Started) -> None:
    """Press Ctrl-C, and press it again while the head is ending the ranks."""
    for _ in range(2):
        signalled("head", HEAD, signal.SIGINT)(runner, started)
        time.sleep(_AGAIN_SECONDS)


def silent_and_killed(runner: ClusterRunner, started: Started) -> None:
    """Stop the first node's agent, so that nothing arrives from it, and then kill the second node's rank.

    The agent continues when the head has given it up.
    """
    agents = [str(pid) for pid in pids(runner, "node0", AGENT)]
    signalled("node0", AGENT, signal.SIGSTOP)(runner, started)
    subprocess.Popen(["sh", "-c", f"sleep {_FROZEN_SECONDS}; kill -CONT {' '.join(agents)}"])
    time.sleep(_SILENT_SECONDS)
    signalled("node1", RANK, signal.SIGKILL)(runner, started)


def killed_one_after_the_other(runner: ClusterRunner, started: Started) -> None:
    """Kill the second node's rank, and soon the first node's, which is stopped, so that it does not end before."""
    signalled("node0", RANK, signal.SIGSTOP)(runner, started)
    signalled("node1", RANK, signal.SIGKILL)(runner, started)
    time.sleep(_SOON_SECONDS)
    signalled("node0", RANK, signal.SIGKILL)(runner, started)


def cable_pulled(runner: ClusterRunner, _: Started) -> None:
    runner.cluster.set_link("node1", "down")


def stop_sharing(runner: ClusterRunner, name: str) -> None:
    """Make a folder of the root that every node has for itself."""
    (runner.root / name).mkdir()
    for node in runner.cluster.nodes:
        runner.cluster.exec(node, ["mount", "-t", "tmpfs", "tmpfs", str(runner.root / name)]).check_returncode()


def inodes_used_up(runner: ClusterRunner, _: Started) -> None:
    """Create empty files on the second node's scratch disk until it has no inodes left."""
    script = f"mkdir {_SCRATCH}/many && cd {_SCRATCH}/many && n=0 && while : > $n; do n=$((n + 1)); done"
    said = runner.cluster.exec("node1", ["sh", "-c", script], {"LC_ALL": "C"}).stderr
    assert "No space left on device" in said, said


@contextmanager
def few_inodes(runner: ClusterRunner) -> Iterator[None]:
    """Let nodes share no storage, give the second node's scratch disk few inodes, and free them afterwards."""
    stop_sharing(runner, UNSHARED)
    script = f"mkdir -p -m 700 {_SCRATCH} && mount -t tmpfs -o mode=700,nr_inodes={_INODES} tmpfs {_SCRATCH}"
    runner.cluster.exec("node1", ["sh", "-c", f"umask 077; {script}"]).check_returncode()
    yield
    runner.cluster.exec("node1", ["rm", "-r", f"{_SCRATCH}/many"]).check_returncode()


def is_literal(runner: ClusterRunner, _: Started) -> None:
    """Assert that every rank's environment has the value exactly as it was given."""
    ranks = [pid for host in runner.cluster.nodes for pid in pids(runner, host, RANK)]
    assert len(ranks) == 2, "the run has ended, or its ranks were not found"
    for pid in ranks:
        assert f"T5_QUOTED={QUOTED}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def is_hidden(runner: ClusterRunner, _: Started) -> None:
    """Assert that the secret is in no command line, and in no process's environment except on the head."""
    for host, process in runner.processes():
        assert SECRET not in " ".join(process.argv)
        assert host == "head" or SECRET.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()


def afterwards(repair: Callable[[Cluster], object]) -> Wrong:
    """Repair something when the run has ended."""

    @contextmanager
    def wrong(runner: ClusterRunner) -> Iterator[None]:
        yield
        repair(runner.cluster)

    return wrong


plugged_in_afterwards = afterwards(lambda cluster: cluster.set_link("node1", "up"))


@contextmanager
def without_sshd(runner: ClusterRunner) -> Iterator[None]:
    runner.cluster.stop_sshd("node1")
    yield
    runner.cluster.start_sshd("node1")


@contextmanager
def other_key(runner: ClusterRunner) -> Iterator[None]:
    """Change the second node's host key during the run, and add the new key to known_hosts afterwards."""
    runner.cluster.rekey("node1")
    yield
    runner.cluster.rekey("node1", trusted=True)


@contextmanager
def port_taken(runner: ClusterRunner) -> Iterator[None]:
    """Let another program listen on the rendezvous port on the first node."""
    server = runner.cluster.start("node0", ["python", "-m", "http.server", str(MASTER_PORT)])
    yield
    for pid in pids(runner, "node0", "http.server"):
        os.kill(pid, signal.SIGKILL)
    server.wait()


def hostfile(text: str) -> Wrong:

    @contextmanager
    def wrong(runner: ClusterRunner) -> Iterator[None]:
        runner.cluster.disk("head", HOSTFILE).write_text(text)
        yield
        runner.cluster.disk("head", HOSTFILE).write_text(runner.cluster.hostfile())

    return wrong


@contextmanager
def other_torch(runner: ClusterRunner) -> Iterator[None]:
    """Make the second node report another version of torch."""
    torch = distribution("torch")
    metadata = str(torch.locate_file(f"torch-{torch.version}.dist-info/METADATA"))
    other = re.sub("^Version: .*$", "Version: 2.0.1", Path(metadata).read_text("utf-8"), count=1, flags=re.MULTILINE)
    runner.cluster.disk("node1", f"{HOME}/METADATA").write_text(other, "utf-8")
    runner.cluster.exec("node1", ["mount", "--bind", f"{HOME}/METADATA", metadata]).check_returncode()
    yield
    runner.cluster.exec("node1", ["umount", metadata]).check_returncode()


@contextmanager
def stale_lock(runner: ClusterRunner) -> Iterator[None]:
    """Leave the lock of a killed compilation on the second node, and assert that the run removes it."""
    (folder,) = runner.cluster.disk("node1", host_files.OPERATORS).rglob("deepspeed_shm_comm")
    lock = folder / "lock"
    lock.touch()
    yield
    assert not lock.exists()


@contextmanager
def nothing_executed(runner: ClusterRunner) -> Iterator[None]:
    """Assert afterwards that no shell on any host executed the text."""
    yield
    for host in runner.cluster.hosts:
        assert not list(runner.cluster.host(host).disk.rglob("executed"))


@contextmanager
def nothing_written(runner: ClusterRunner) -> Iterator[None]:
    """Assert afterwards that no file contains the secret, on any host's disk or in the run's root."""
    yield
    disks = [runner.cluster.host(host).disk for host in runner.cluster.hosts]
    found = subprocess.run(["grep", "-rlF", SECRET, *disks, runner.root], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")


Refused = partial(Fault, exit_code=PreflightError.exit_code)
FAULTS = [
    Fault("a rank is killed", "rank 1.*node1.*killed", signalled("node1", RANK, signal.SIGKILL), blames=NODE1),
    Fault(
        "a rank is stopped", "rank 1.*node1.*no sign of life", signalled("node1", RANK, signal.SIGSTOP),
        blames=NODE1, in_ci=True,
    ),
    Fault(
        "a host is silent while another host's rank fails", "rank 1.*node1.*killed", silent_and_killed,
        blames=NODE1, settings=("cluster.lease_seconds=30",),
    ),
    Fault(
        "a rank is killed, and another host's a second later", "rank 1.*node1.*killed", killed_one_after_the_other,
        blames=NODE1,
    ),
    Fault("DeepSpeed's launcher is killed", "launcher", signalled("head", LAUNCHER, signal.SIGKILL), blames=()),
    Fault("pdsh is killed", "launcher", signalled("head", PDSH, signal.SIGKILL), blames=(), in_ci=True),
    Fault("the head is killed", "", signalled("head", HEAD, signal.SIGKILL), exit_code=137),
    Fault(
        "the head is killed, and started again at once", "", signalled("head", HEAD, signal.SIGKILL),
        exit_code=0, started_again=True,
    ),
    Fault(
        "a node loses power", "node1", lambda runner, _: runner.cluster.power_cut("node1"),
        wrong=afterwards(lambda cluster: cluster.boot("node1")), blames=NODE1, in_ci=True,
    ),
    Fault(
        "a node's cable is pulled", "node1", cable_pulled, wrong=plugged_in_afterwards, blames=NODE1,
    ),
    Fault(
        # Existing connections stay, new ones are refused.
        "sshd of a node stops while it trains", "", lambda runner, _: runner.cluster.stop_sshd("node1"),
        wrong=afterwards(lambda cluster: cluster.start_sshd("node1")), exit_code=0,
    ),
    Fault("Ctrl-C", "interrupted", signalled("head", HEAD, signal.SIGINT), exit_code=130),
    Fault("Ctrl-C, twice", "interrupted", interrupted_twice, exit_code=130),
    Refused("sshd of a node is down", "node1.*refused", wrong=without_sshd, in_ci=True),
    Refused("a node has another host key", "node1.*key", wrong=other_key, in_ci=True),
    Refused(
        "the port is taken", str(MASTER_PORT), wrong=port_taken, settings=(f"cluster.master_port={MASTER_PORT}",)
    ),
    Refused("an unknown host name", "node9", wrong=hostfile("node0 slots=1\nnode9 slots=1\n"), in_ci=True),
    Fault(
        "slots=0", "line 2.*node1.*slots=0", wrong=hostfile("node0 slots=1\nnode1 slots=0\n"),
        in_ci=True, exit_code=SpecError.exit_code,
    ),
    Refused(
        "one machine listed twice", "names refer to the same machine",
        wrong=hostfile("node0 slots=1\n10.77.0.10 slots=1\n"),
    ),
    Refused("a node has another torch", "node1: torch 2.0.1", wrong=other_torch, in_ci=True),
    Fault("a killed compilation left its lock", "", wrong=stale_lock, exit_code=0),
    Fault(
        "$(...) and quotes in an environment variable and in the root's name", "", is_literal, wrong=nothing_executed,
        exit_code=0, settings=('cluster.environment=["T5_QUOTED"]',), environment={"T5_QUOTED": QUOTED}, in_ci=True,
        root='it\'s "a" $(touch executed) `touch executed`; touch executed',
    ),
    Fault(
        "a secret in the environment", "", is_hidden, wrong=nothing_written,
        exit_code=0, environment={"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET},
    ),
    # The last one: the run is resumed after all faults, on these mounts, which a node that loses power would lose.
    Fault(
        "a host's inodes are full", "rank 1.*node1.*no free inodes.*exclude node1", inodes_used_up, wrong=few_inodes,
        exit_code=DiskFull.exit_code, root=UNSHARED, blames=NODE1,
    ),
]  # fmt: skip
