"""The whole chain over two hosts that share nothing but the network."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.testcluster.cluster import Cluster
from infra.testcluster.view import HOSTFILE, ROOT
from t5train.errors import TestClusterError

_RUN = "demo-cluster"


def run_demo(root: Path, arguments: Sequence[str] = ()) -> None:
    """Train and publish on a cluster of its own, which is gone afterwards; ``root`` gets the published folder.

    ``arguments`` are further ones of ``t5-pretrain run smoke``. Raises TestClusterError when that fails, or when a host
    is left with a process of the run.
    """
    with Cluster.temporary(f"{_RUN}-{os.getpid()}") as cluster:
        where = ["--root", ROOT, "--name", _RUN, "--hostfile", HOSTFILE]
        # What it publishes on the head's disk goes with the head.
        chain = cluster.start("head", ["t5-pretrain", "run", "smoke", *where, *arguments])
        _require(chain.wait() == 0, "the chain did not come to its end: see what it said")
        _require(not cluster.disk("node0", ROOT).exists(), f"node0 has {ROOT}: the hosts share it")
        _require_no_processes(cluster)
        export = cluster.disk("head", f"{ROOT}/runs/{_RUN}/export")
        command = Path(sys.executable).with_name("t5-pretrain")
        place = root.absolute() / "published" / _RUN
        published = subprocess.run([command, "publish", export, place], check=False)
        _require(published.returncode == 0, f"what was trained could not be published to {place}: see what it said")


def _require_no_processes(cluster: Cluster) -> None:
    for host in cluster.hosts:
        left = [process for process in cluster.processes(host) if "[listener]" not in " ".join(process.argv)]
        _require(not left, f"{host} still runs {left}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TestClusterError(otherwise)
