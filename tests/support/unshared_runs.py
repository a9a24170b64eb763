"""A run of a very small model on a test cluster whose hosts share no storage, and the files on their disks."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.node import node_folders
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.checkpoint import tags
from t5train.files.run_folder import ATTEMPT_SPEC, ATTEMPTS, CHECKPOINTS, WITNESS_FOLDER
from t5train.spec.rank_job import TrainJob
from tests.support.cluster_runs import ClusterRunner, Ended, Started, prepare

RUN = "resumed"
NODE_FOLDER = str(node_folders.node_path())
SCRATCH = f"{NODE_FOLDER}/scratch"
SETTINGS: dict[str, Any] = {
    "optimizer.num_steps": 180,
    "storage.checkpoint_every_steps": 20,  # at the SLOW rate, a gather then ends before the next save
    "storage.validate_every_steps": 180,
    "storage.keep_last": 9,
    "cluster.lease_seconds": 10,
    "cluster.grace_seconds": 1,
}
TWO_NODES = ("--hostfile", HOSTFILE, "--num-nodes", "2")
SECONDS = 400
SLOW = "8mbit"
"""Rate of a network link at which a step takes a second, and a gather beside it ten."""
_POLL_SECONDS = 0.002

Files = Mapping[tuple[str, str, str], int]
"""Inodes of files, by host, tag and name. A file that is copied again gets another inode."""


@dataclass(frozen=True)
class UnsharedHosts:
    """A cluster whose hosts share no storage, and the run."""

    cluster: Cluster
    runner: ClusterRunner
    backup: Path
    """The folder to which ``back_up_disks`` copies."""

    def start(self, command: str = "train", options: tuple[str, ...] = TWO_NODES, name: str = RUN) -> Started:
        """Start or resume the run on the head."""
        return self.runner.start(command, name, options, root=Path(ROOT))

    def folder(self, name: str = RUN) -> Path:
        """The run's folder on the head."""
        return self.cluster.disk("head", f"{ROOT}/runs/{name}")

    def checkpoints(self, host: str) -> Path:
        """The folder of a host's checkpoints, which need not exist. On the head, it is the gathered copy."""
        if host == "head":
            return self.folder() / CHECKPOINTS
        found = self.cluster.disk(host, f"{SCRATCH}/runs").glob(f"{RUN}-*/{CHECKPOINTS}")
        return next(found, self.cluster.disk(host, SCRATCH) / "none")

    def tags(self, host: str) -> set[str]:
        """Names of the tags that a host has, complete or not."""
        return {path.name for path in self.checkpoints(host).glob("step-*")}

    def newest(self) -> str:
        """The newest complete tag that the head has gathered."""
        return tags.complete_tags(self.checkpoints("head"))[0]

    def files(self) -> Files:
        """Inodes of all checkpoint files on all hosts, except sidecars, which every gather writes again."""
        paths = {host: self.checkpoints(host).glob("step-*/*.pt") for host in self.cluster.hosts}
        return {
            (host, path.parent.name, path.name): path.stat().st_ino for host, found in paths.items() for path in found
        }

    def resumed_from(self) -> list[str]:
        """The tag from which the ranks of each attempt resumed, or "the start"."""
        specs = sorted((self.folder() / ATTEMPTS).glob(f"*/{ATTEMPT_SPEC}"))
        return [TrainJob.read(path).resume_tag or "the start" for path in specs]

    @property
    def has_finished(self) -> bool:
        """Whether the head has the results of the completed run."""
        return (self.folder() / WITNESS_FOLDER).exists()

    def await_saving(self, run: Started, host: str = "node1") -> str:
        """Wait until a node begins to save a tag, possibly one that it has in part, and return the tag's name.

        The node's rank is running at that moment.
        """
        folder, since = self.checkpoints(host), time.time_ns()
        await_condition(run, lambda: _newer(folder, since) is not None)
        return str(_newer(folder, since))

    def power_cycle(self) -> None:
        """Cut the power of all hosts at once, and boot them with their disks."""
        self._switch_off()
        for host in self.cluster.hosts:
            self.cluster.boot(host)

    def back_up_disks(self) -> None:
        """Copy the run's files from each disk."""
        for host in self.cluster.hosts:
            for folder in self._folders(host):
                _copy(folder, self.backup / folder.relative_to(folder.anchor))

    def restore_disks(self) -> None:
        """Cut the power of all hosts, and boot them with their disks as ``back_up_disks`` copied them."""
        self._switch_off()
        for host in self.cluster.hosts:
            for folder in self._folders(host):
                _copy(self.backup / folder.relative_to(folder.anchor), folder)
            self.cluster.boot(host)

    def _switch_off(self) -> None:
        for host in reversed(self.cluster.hosts):
            self.cluster.power_cut(host)

    def _folders(self, host: str) -> list[Path]:
        return [self.cluster.disk(host, path) for path in (ROOT, NODE_FOLDER)]


@contextmanager
def unshared_hosts() -> Iterator[UnsharedHosts]:
    """A head, two nodes and a spare, with text, tokenizer and token shards on the head."""
    with TemporaryDirectory() as folder, Cluster.temporary(f"resumes-{os.getpid()}", nodes=3) as cluster:
        prepared, backup = Path(folder, "prepared"), Path(folder, "kept")
        prepared.mkdir()
        runner = ClusterRunner(cluster, prepared, SETTINGS)
        prepare(prepared)
        _copy(prepared, cluster.disk("head", ROOT))
        yield UnsharedHosts(cluster, runner, backup)


def interrupt(hosts: UnsharedHosts) -> None:
    """Start the run, and power-cycle all hosts once it has saved at least twice and all checkpoints are gathered."""
    run = hosts.start()
    await_condition(run, lambda: bool(hosts.tags("node0")))
    hosts.cluster.set_rate("node0", SLOW)
    await_condition(
        run, lambda: len(hosts.tags("node0")) > 1 and hosts.tags("node0") == hosts.tags("node1") == _complete(hosts)
    )
    hosts.power_cycle()
    run.wait(SECONDS)


def _complete(hosts: UnsharedHosts) -> set[str]:
    return set(tags.complete_tags(hosts.checkpoints("head")))


def await_condition(run: Started, condition: Callable[[], bool]) -> None:
    """Wait until ``condition()``. Raises AssertionError with the run's output if it ends first or takes too long."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        alive = run.process.poll() is None and time.monotonic() < deadline
        assert alive, (
            f"the run ended or timed out before the condition held: {run.log.read_text('utf-8', 'replace')[-4000:]}"
        )
        time.sleep(_POLL_SECONDS)


def require_success(ended: Ended) -> None:
    """Raise AssertionError with the command's output if the command failed."""
    assert ended.exit_code == 0, ended.output[-4000:]


def _newer(checkpoints: Path, since_ns: int) -> str | None:
    """Name of a tag whose folder was made or changed after ``since_ns`` (Unix time in ns), or None."""
    for folder in checkpoints.glob("step-*"):
        with suppress(FileNotFoundError):  # removed just now, to save its tag again
            if folder.stat().st_mtime_ns > since_ns:
                return folder.name
    return None


def _copy(source: Path, target: Path) -> None:
    """Replace ``target`` with a copy of ``source``, including times. Remove it if there is no ``source``."""
    subprocess.run(["rm", "-rf", target], check=True)
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", source, target], check=True)
