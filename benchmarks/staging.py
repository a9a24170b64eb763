"""Compare staging a folder to four nodes over links of 200 Mbit/s: from node to node, or from the head to each node.

    sudo python -m benchmarks.staging [--nodes 4] [--megabytes 256] [--rate 200mbit] [--rounds 3]
        [--into benchmarks/results/staging.json]

Runs on the test cluster (docs/tutorials/test-cluster.md), with every host's link limited in both directions. Times are
compared with that of staging the same folder to a single node. Nothing of the folder is on the nodes' disks before a
measurement. The table shows the median of the rounds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measured_result import add_into, measured_here, spread
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Ssh
from infra.head.storage.provisioning import stage_folder
from infra.node.storage.pull import listed
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME
from t5train.spec import ClusterSpec

FILES, PLACE = 8, "shards/benchmark"
SOURCE = f"{HOME}/source"
CASES = ("one node", "chain", "star")


def main() -> None:
    """Create the cluster, run all cases in turns on its head, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--nodes", type=int, default=4)
    arguments.add_argument("--megabytes", type=int, default=256)
    arguments.add_argument("--rate", default="200mbit")
    arguments.add_argument("--rounds", type=int, default=3)
    add_into(arguments)
    arguments.add_argument("--on-head", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.on_head:
        print(json.dumps(seconds_on_head(chosen.on_head[0], Path(chosen.on_head[1]), chosen.nodes)))
        return
    times: dict[str, list[float]] = {case: [] for case in CASES}
    with Cluster.temporary(f"staging-{os.getpid()}", nodes=chosen.nodes) as cluster:
        for host in cluster.hosts:
            cluster.set_rate(host, chosen.rate)
        make_folder(cluster.disk("head", SOURCE), chosen.megabytes << 20)
        for _ in range(chosen.rounds):
            for case in CASES:
                times[case].append(one_round(cluster, case, chosen.nodes))
    show(times, chosen)


def make_folder(folder: Path, size: int) -> None:
    """Fill a folder with random files, which cannot be compressed in transit."""
    folder.mkdir(parents=True)
    for number in range(FILES):
        (folder / f"train-{number:05d}.bin").write_bytes(os.urandom(size // FILES))


def one_round(cluster: Cluster, case: str, nodes: int) -> float:
    """Return the seconds of a case, and remove what it staged."""
    argv = [sys.executable, __file__, "--nodes", str(nodes), "--on-head", case, SOURCE]
    done = cluster.exec("head", argv, timeout=600)
    assert done.returncode == 0, done.stderr
    for node in cluster.nodes:
        cluster.exec(node, ["sh", "-c", f"rm -r /var/tmp/t5-pretrain-*/scratch/{PLACE}"], timeout=60)
    return float(json.loads(done.stdout))


def seconds_on_head(case: str, source: Path, num_nodes: int) -> float:
    """Return the seconds of staging on the head. Starting this process does not count, but all that it starts does."""
    files = listed(source, sorted(path.name for path in source.iterdir()))
    hosts = [f"node{number}" for number in range(num_nodes)]
    with tempfile.TemporaryDirectory() as folder:
        transport = Ssh.configured(ClusterSpec(), Path(folder))

        def stage(*names: str) -> None:
            stage_folder(Nodes(transport, names), source, files, PLACE, "benchmark")

        cases: dict[str, Callable[[], object]] = {
            "one node": lambda: stage(hosts[0]),
            "chain": lambda: stage(*hosts),
            "star": lambda: list(ThreadPoolExecutor(num_nodes).map(stage, hosts)),
        }
        started = time.perf_counter()
        cases[case]()
        return time.perf_counter() - started


def show(times: dict[str, list[float]], chosen: argparse.Namespace) -> None:
    """Print the result, and write it to a file if one is given."""
    one = statistics.median(times["one node"])
    rows = [
        {"way": case, "seconds": spread(seconds, 1), "relative to one node": round(statistics.median(seconds) / one, 2)}
        for case, seconds in times.items()
    ]
    what = f"Staging {chosen.megabytes} MiB to {chosen.nodes} nodes over links of {chosen.rate}"
    measured_here(what, rows).show(chosen.into)


if __name__ == "__main__":
    main()
