"""Ranks on hosts keep training while the head is killed, restarted or cut off, and end when the head ends them."""

import json
import os
import signal
import time

import pytest

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE
from tests.support.cluster_runs import ClusterRunner, Started

pytestmark = pytest.mark.cluster

LONG = {"optimizer.num_steps": 100_000, "storage.checkpoint_every_steps": 200, "storage.validate_every_steps": 100_000}
OPTIONS = ["--hostfile", HOSTFILE, "--num-nodes", "2"]


def settings(**changes: object) -> list[str]:
    return [part for name, value in (LONG | changes).items() for part in ("--set", f"{name}={value}")]


def kill_head(cluster: Cluster) -> None:
    head = next(one for one in cluster.processes("head") if {"train", "smoke"} <= set(one.argv))
    os.kill(head.pid, signal.SIGKILL)


def await_line(started: Started, text: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in started.log.read_text("utf-8"):
        assert time.monotonic() < deadline, started.log.read_text("utf-8")
        time.sleep(0.1)


def await_rank(cluster: Cluster, host: str, attempt: str, seconds: float = 120.0) -> int:
    """Wait for a rank of an attempt on a host, and return its pid."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in cluster.processes(host):
            if process.argv[1:3] == ("-m", "t5train.train") and attempt in process.argv[-1]:
                return process.pid
        time.sleep(0.1)
    raise AssertionError(f"no rank of {attempt} on {host} in {seconds} s")


def start(runner: ClusterRunner, name: str, **changes: object) -> Started:
    return runner.start("train", name, [*OPTIONS, *settings(**{"cluster.lease_seconds": 30} | changes)])


def attempts(started: Started) -> list[str]:
    return sorted(path.name for path in (started.run_folder / "attempts").iterdir())


def test_a_restarted_head_finds_ranks_that_survive_an_outage_and_ends_them_before_another_job(
    runner: ClusterRunner,
) -> None:
    first = start(runner, "attached")
    first.await_step(5)
    kill_head(runner.cluster)
    first.process.wait(60)
    second = start(runner, "attached")
    second.await_step(second.step + 10)
    runner.cluster.set_link("node1", "down")
    await_line(second, "node1 has not responded for")
    runner.cluster.set_link("node1", "up")
    await_line(second, "node1 responds again")
    second.await_step(second.step + 10)
    await_line(second, "attempt 1 of attached is still running; continuing it")
    kill_head(runner.cluster)
    second.process.wait(60)
    assert attempts(second) == ["0001"]
    third = start(runner, "attached", **{"cluster.grace_seconds": 11})  # another job: its settings differ
    rank = await_rank(runner.cluster, "node1", "attached-0002")
    folder = third.run_folder / "attempts" / "0001"
    assert {"rank-00000.log", "rank-00001.exit.json", "launcher.log"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "rank-00001.exit.json").read_text())["reason"] == "the head ended the run"
    os.kill(rank, signal.SIGKILL)
    ended = third.wait(240)
    assert ended.exit_code == 8
    assert "rank 1 of 2 on node1 was killed by SIGKILL" in ended.output
    assert attempts(third) == ["0001", "0002"]
    assert not runner.left()
    for host in ("head", "node0", "node1"):
        assert not any(runner.cluster.disk(host, "/var/tmp/t5-pretrain-0").glob("[ah]*/*"))
