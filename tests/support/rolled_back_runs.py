"""A run on hosts that share only the network, and what tests do to its files and to the disks of its nodes."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.node.node_folders import node_path
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.files.run_folder import FAILURES
from t5train.spec.rank_job import TrainJob
from tests.support.cluster_runs import ClusterRunner, Ended, Started

FIRST, LAST = "step-00000015", "step-00000030"
"""The checkpoints of a run."""
SCRATCH = f"{node_path()}/scratch"
HOSTS = ("--hostfile", HOSTFILE, "--num-nodes", "2")
SECONDS = 400


class UnsharedRun:
    """A cluster whose hosts share no storage, and a run on it."""

    def __init__(self, cluster: Cluster, logs: Path, name: str, root: str = ROOT, **settings: Any) -> None:
        self.cluster, self.name, self._root = cluster, name, Path(root)
        self.root = cluster.disk("head", root)
        self.runner = ClusterRunner(cluster, logs, settings)
        self.folder = self.root / "runs" / name

    def start(self, command: str, options: Sequence[str]) -> Started:
        """Start the run on the head."""
        return self.runner.start(command, self.name, options, root=self._root)

    def train(self, options: Sequence[str] = HOSTS) -> Ended:
        """Start the run on the head, and wait for it to end."""
        ended = self.start("train", options).wait(SECONDS)
        assert not self.runner.left()
        return ended

    def folder_on(self, host: str) -> Path:
        """The run's folder on a node's own disk."""
        (found,) = self.cluster.disk(host, f"{SCRATCH}/runs").glob(f"{self.name}-*")
        return found

    def resumed_from(self) -> list[str | None]:
        """The tag from which each attempt resumed; None for an attempt that began at step 0."""
        specs = sorted(self.folder.glob("attempts/*/spec.json"))
        return [TrainJob.read(path).resume_tag for path in specs]

    def roll_back(self, hosts: list[str]) -> None:
        """Make the run look as if it had ended after its first checkpoint, without any failure of a host."""
        for name in ("manifest.json", FAILURES):
            (self.folder / name).unlink(missing_ok=True)
        for folder in (self.folder, *map(self.folder_on, hosts)):
            shutil.rmtree(folder / "checkpoints" / LAST, ignore_errors=True)
            shutil.rmtree(folder / "witness", ignore_errors=True)

    def wipe(self, host: str) -> None:
        """Replace a node's disk with an empty one."""
        self.cluster.power_cut(host)
        self.cluster.boot(host, new_disk=True)
