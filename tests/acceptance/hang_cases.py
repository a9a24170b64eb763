"""More faults of docs/evidence/faults.md: something hangs, or is cut off in a certain phase."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from infra.node import node_folders
from t5train.errors import NotGathered
from t5train.files import heartbeat
from t5train.files.run_folder import FAILURES
from tests.acceptance.fault_cases import (
    HEAD,
    NODE1,
    RANK,
    Fault,
    Strike,
    cable_pulled,
    pids,
    plugged_in_afterwards,
    signal_all,
    signalled,
    stop_sharing,
)
from tests.support.cluster_runs import SSHD, ClusterRunner, Started
from tests.support.hanging_disk import DEVICE
from tests.support.object_server import BUCKET, ObjectServer
from tests.support.unshared_runs import await_condition

_SHORTER_SECONDS, _LONGER_SECONDS = 10, 25
_SLOW, _SLOWER = "8mbit", "1mbit"  # with the first, a step takes a second
_STRIKE_AT, _NEXT_SAVE, _LAST_STEP = 25, 40, 70
_SECONDS = 400
_ALL = ("head", "node0", "node1")
_POLL_SECONDS = 0.02
_DISK, _WEED = "tests.support.hanging_disk", "weed"
_GATHERED, _BETWEEN = "gathered", "between"
_DATA = Path("/var/tmp/store")  # noqa: S108 - each host of the test cluster has a /var/tmp that no other user sees
_STORE = ObjectServer(_DATA)


def head_paused(seconds: float) -> Strike:
    """Stop the head for some seconds; training is slow meanwhile."""

    def strike(runner: ClusterRunner, started: Started) -> None:
        runner.cluster.set_rate("node0", _SLOW)
        signal_all(runner, "head", HEAD, signal.SIGSTOP)
        time.sleep(seconds)
        started.process.send_signal(signal.SIGCONT)  # nsenter stops with its child, and continues it
        runner.cluster.set_rate("node0", None)

    return strike


def _start(
    runner: ClusterRunner, host: str, name: str, argv: list[str], environment: Mapping[str, str] | None = None
) -> None:
    """Start a program on a host, whose first process becomes its parent, so that it can be stopped."""
    script = f'"$@" > /var/tmp/{name}.log 2>&1 &'
    runner.cluster.exec(host, ["sh", "-c", script, "sh", *argv], environment).check_returncode()


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(_POLL_SECONDS)


def _is_mounted(runner: ClusterRunner, host: str, root: str) -> bool:
    return runner.cluster.exec(host, ["stat", "-f", "-c", "%T", root]).stdout.startswith("fuse")


def ranks_start(runner: ClusterRunner, started: Started) -> None:
    """Wait until the second node's rank has started, which takes its first step seconds later."""
    await_condition(started, lambda: bool(pids(runner, "node1", RANK)))


def save_hangs(runner: ClusterRunner, started: Started) -> None:
    """Let the root hang on the second node, and wait until its rank is saving, which then cannot end."""
    started.await_step(_STRIKE_AT, _SECONDS)
    signal_all(runner, "node1", _DISK, signal.SIGUSR1)
    since = time.monotonic()
    await_condition(started, lambda: any(beat.is_saving and beat.beat > since for beat in _beats(runner)))


def _beats(runner: ClusterRunner) -> list[heartbeat.Beat]:
    """The last heartbeat of the second node's rank, if there is one."""
    attempts = runner.cluster.disk("node1", str(node_folders.attempts_folder()))
    found = (heartbeat.read(path) for path in attempts.glob("*/rank-00001.beat"))
    return [beat for beat in found if beat is not None]


def root_hangs_on(runner: ClusterRunner, _: Started) -> None:
    """Nothing more breaks: the root hangs already."""


def root_hangs_for_a_while(runner: ClusterRunner, _: Started) -> None:
    """Let the root hang everywhere, for longer than the lease and for less than a step may take."""
    for host in _ALL:
        signal_all(runner, host, _DISK, signal.SIGUSR1)
    time.sleep(_LONGER_SECONDS)
    for host in _ALL:
        signal_all(runner, host, _DISK, signal.SIGCONT)


def pulled_while_saving(runner: ClusterRunner, started: Started) -> None:
    cable_pulled(runner, started)
    signal_all(runner, "node1", _DISK, signal.SIGCONT)


def all_have_finished(runner: ClusterRunner, started: Started) -> None:
    """Wait until the head knows that all ranks have finished, after which it gathers the last checkpoint.

    From the last step on, the second node's link is slow: the gather must not be over before the cable is pulled.
    """
    await_condition(started, lambda: any(beat.step >= _LAST_STEP for beat in _beats(runner)))
    runner.cluster.set_rate("node1", _SLOWER)
    records = [started.run_folder / f"attempts/0001/rank-0000{rank}.exit.json" for rank in range(2)]
    await_condition(started, lambda: all(path.exists() for path in records))


@contextmanager
def unshared(runner: ClusterRunner) -> Iterator[None]:
    stop_sharing(runner, _GATHERED)
    with plugged_in_afterwards(runner):
        yield
    runner.cluster.set_rate("node1", None)


@contextmanager
def hanging_root(runner: ClusterRunner, hosts: Sequence[str]) -> Iterator[None]:
    """Let hosts see the root through a file system that can hang."""
    root = str(runner.root)
    for host in hosts:
        _start(runner, host, _DISK, [sys.executable, "-m", _DISK, root, root])
        _await(lambda host=host: _is_mounted(runner, host, root))
    try:
        yield
    finally:
        for host in hosts:
            for pid in pids(runner, host, _DISK):
                os.kill(pid, signal.SIGKILL)  # ends all waits for it
            runner.cluster.exec(host, ["umount", "--lazy", root]).check_returncode()


@contextmanager
def hanging_root_and_cable(runner: ClusterRunner) -> Iterator[None]:
    with plugged_in_afterwards(runner), hanging_root(runner, NODE1):
        yield


def without_store(runner: ClusterRunner, started: Started) -> None:
    """Let the store accept connections but not answer, until all steps are done and no rank is running."""
    signal_all(runner, "head", _WEED, signal.SIGSTOP)
    started.await_step(_LAST_STEP, _SECONDS)
    await_condition(started, lambda: not any(pids(runner, host, RANK) for host in runner.cluster.nodes))
    signal_all(runner, "head", _WEED, signal.SIGCONT)


def store_hangs(runner: ClusterRunner, started: Started) -> None:
    """Stop the store while training goes on, and wait until there is another checkpoint to copy."""
    started.await_step(_STRIKE_AT, _SECONDS)
    signal_all(runner, "head", _WEED, signal.SIGSTOP)
    runner.cluster.set_rate("node0", _SLOW)
    started.await_step(_NEXT_SAVE + 2, _SECONDS)


@contextmanager
def store(runner: ClusterRunner) -> Iterator[None]:
    """Run an object store on the head. It answers again after the run, which resumes with it."""
    runner.cluster.disk("head", str(_DATA)).mkdir(parents=True, exist_ok=True)
    if not pids(runner, "head", _WEED):
        _start(runner, "head", _WEED, _STORE.command, {**_STORE.environment, "TMPDIR": str(_DATA)})
    asks = f"import boto3; boto3.client('s3').list_objects_v2(Bucket='{BUCKET}')"
    _await(lambda: runner.cluster.exec("head", [sys.executable, "-c", asks], _STORE.environment).returncode == 0)
    try:
        yield
    finally:
        for pid in pids(runner, "head", _WEED):
            os.kill(pid, signal.SIGCONT)


def cut_between_attempts(runner: ClusterRunner, started: Started) -> None:
    """Kill the second node's rank, and once that is recorded, the processes of sshd that serve the head there.

    The next attempt must not have begun by then.
    """
    signalled("node1", RANK, signal.SIGKILL)(runner, started)
    await_condition(started, (started.run_folder / FAILURES).exists)
    found = runner.cluster.processes("node1")
    serving = [each for each in found if each.argv[0].startswith(SSHD) and "listener" not in each.argv[0]]
    assert serving, f"no sshd serves the head on node1: {found}"
    for each in serving:
        os.kill(each.pid, signal.SIGKILL)
    assert not (started.run_folder / "attempts/0002").exists()


@contextmanager
def claimed_between_attempts(runner: ClusterRunner) -> Iterator[None]:
    """Let nodes share no storage, so that the head claims the run there."""
    stop_sharing(runner, _BETWEEN)
    for name in ("corpus", "tokenizer", "shards"):
        shutil.copytree(runner.root / name, runner.root / _BETWEEN / name)
    yield


_stored = partial(
    Fault, wrong=store, settings=(f"storage.publish_checkpoints_under=s3://{BUCKET}/runs",),
    environment=_STORE.environment,
)  # fmt: skip
_OF_ROOTS = [
    Fault(
        "a node's cable is pulled while it saves", "node1", pulled_while_saving, save_hangs,
        hanging_root_and_cable, blames=NODE1,
    ),
    Fault(
        "the root hangs on a node",
        "rank 1.*node1.*deadline.*check the disk that it wrote to", root_hangs_on, save_hangs,
        partial(hanging_root, hosts=NODE1), settings=("cluster.deadlines.save_seconds=15",), blames=NODE1,
    ),
    Fault(
        "the root hangs on all hosts for longer than the lease, and answers again", "", root_hangs_for_a_while,
        wrong=partial(hanging_root, hosts=_ALL), exit_code=0,
    ),
]  # fmt: skip
FAULTS = [
    Fault(
        "the head is stopped for less than the lease, and continues", "", head_paused(_SHORTER_SECONDS),
        exit_code=0, settings=("cluster.lease_seconds=30",),
    ),
    Fault(
        "the head is stopped for more than the lease, and continues", "the head did not run for [0-9]+ s",
        head_paused(_LONGER_SECONDS), blames=(),
    ),
    Fault(
        "a node's cable is pulled while ranks start", "node1", cable_pulled, ranks_start,
        plugged_in_afterwards, blames=NODE1,
    ),
    Fault(
        "a node's cable is pulled before the last gather",
        "node1 was lost before the head had the whole result", cable_pulled, all_have_finished, unshared,
        exit_code=NotGathered.exit_code, root=_GATHERED, blames=NODE1,
    ),
    _stored("the bucket hangs until ranks are done", "", without_store, exit_code=0),
    _stored(
        "the bucket hangs, and Ctrl-C", "interrupted", signalled("head", HEAD, signal.SIGINT), store_hangs,
        exit_code=130,
    ),
    Fault(
        "a channel is cut between two attempts", "", cut_between_attempts, wrong=claimed_between_attempts,
        command="run", settings=("cluster.retries=1",), root=_BETWEEN, blames=NODE1, exit_code=0,
    ),
    *(_OF_ROOTS if DEVICE.exists() else []),
]  # fmt: skip
