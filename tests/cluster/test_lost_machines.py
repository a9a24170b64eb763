"""A run whose machines are all lost continues on fresh ones from the checkpoints that it stored in S3."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.checkpoint.resume_point import last_complete
from t5train.records import metrics
from tests.support.cluster_runs import ENVIRONMENT, ClusterRunner, Ended, Started, weights
from tests.support.object_server import BUCKET, ObjectServer

pytestmark = pytest.mark.cluster

NAME, SECONDS = "lost", 600
LEASE_SECONDS = 30
"""Longer than a busy machine takes to boot three hosts and to ask for the run again."""
MACHINES, STORE = ("head", "node0", "node1"), "node2"
SLOW = "8mbit"  # a step takes a second
ANSWERS = f"import boto3; boto3.client('s3').list_objects_v2(Bucket='{BUCKET}')"


@pytest.fixture
def machines(tmp_path: Path, prepared: Path) -> Iterator[ClusterRunner]:
    """A head and three nodes that share nothing. The last one does not train, but has the store."""
    with Cluster.temporary(f"lost-{os.getpid()}", nodes=3) as cluster:
        shutil.copytree(prepared, cluster.disk("head", ROOT), dirs_exist_ok=True)
        settings = {
            "storage.publish_checkpoints_under": f"s3://{BUCKET}/runs",
            "cluster.lease_seconds": LEASE_SECONDS,
            "cluster.num_nodes": 2,
        }
        yield ClusterRunner(cluster, tmp_path, settings)


@pytest.fixture
def store(machines: ClusterRunner, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of S3 clients, for a server on a host of the cluster."""
    cluster = machines.cluster
    server = ObjectServer(Path("/var/tmp/store"), address=cluster.address(STORE))
    assert cluster.exec(STORE, ["mkdir", "-p", "/var/tmp/store"]).returncode == 0
    with open(tmp_path / "store.log", "wb") as log:
        running = cluster.start(STORE, server.command, log, server.environment | {"TMPDIR": "/var/tmp/store"})
    python = sys.executable
    deadline = time.monotonic() + 180
    while cluster.exec("head", [python, "-c", ANSWERS], server.environment).returncode:
        alive = running.poll() is None and time.monotonic() < deadline
        assert alive, (tmp_path / "store.log").read_text()[-2000:]
    yield server.environment
    cluster.power_cut(STORE)
    running.wait()


def continued(machines: ClusterRunner, store: dict[str, str]) -> Ended:
    """Continue the run from the store on the head, and wait for it to end."""
    log = machines.root / "continued.log"
    command = ["t5-pretrain", "run", "--from", f"s3://{BUCKET}/runs/{NAME}", "--root", ROOT]
    with open(log, "wb") as output:
        process = machines.cluster.start("head", command, output.fileno(), ENVIRONMENT | store)
    return Started(process, log, machines.cluster.disk("head", f"{ROOT}/runs/{NAME}")).wait(SECONDS)


def test_a_run_continues_on_fresh_machines_with_the_same_weights_but_not_while_its_lease_is_valid(
    machines: ClusterRunner, store: dict[str, str], one_host: Callable[[int], Any]
) -> None:
    cluster, folder = machines.cluster, machines.cluster.disk("head", f"{ROOT}/runs/{NAME}")
    lost = machines.start("train", NAME, ["--hostfile", HOSTFILE], store, Path(ROOT))
    cluster.set_rate("node0", SLOW)
    deadline = time.monotonic() + SECONDS
    while "step-00000015 is stored" not in (said := lost.log.read_text("utf-8", "replace")):
        alive = lost.process.poll() is None and time.monotonic() < deadline
        assert alive, said[-4000:]
        time.sleep(0.1)
    for host in MACHINES:
        cluster.power_cut(host)
    lost.wait(SECONDS)
    assert not (folder / "witness").exists()
    for host in MACHINES:
        cluster.boot(host, new_disk=True)
        cluster.set_rate(host, None)
    assert not folder.exists()

    refused = continued(machines, store)
    assert refused.exit_code == 6
    assert "whose lease is valid for another" in refused.message
    time.sleep(LEASE_SECONDS + 2)
    ended = continued(machines, store)
    assert ended.exit_code == 0, ended.output[-4000:]
    assert "step-00000015 was restored from" in ended.output
    assert weights(folder) == one_host(2)
    assert [line["step"] for line in metrics.read(folder / "metrics.jsonl") if "loss" in line] == [*range(1, 31)]
    last = last_complete(folder)
    assert last is not None
    assert last.tag == "step-00000030"
