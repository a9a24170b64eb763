"""A run of a very small model on a test cluster whose hosts share nothing, and what lies on their disks."""

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
from t5train.checkpoint import tags as sidecar
from t5train.files.run_folder import ATTEMPT_SPEC, ATTEMPTS, CHECKPOINTS, WITNESS_FOLDER
from t5train.spec.rank_job import TrainJob
from tests.support.cluster_runs import Ended, Stage, Started, prepare

RUN = "resumed"
NODE_FOLDER = str(node_folders.place())
SCRATCH = f"{NODE_FOLDER}/scratch"
SETTINGS: dict[str, Any] = {
    "optimizer.num_steps": 90,
    "storage.checkpoint_every_steps": 10,
    "storage.validate_every_steps": 90,
    "storage.keep_last": 9,
    "cluster.lease_seconds": 10,
    "cluster.grace_seconds": 1,
}
TWO_NODES = ("--hostfile", HOSTFILE, "--num-nodes", "2")
SECONDS = 400
SLOW = "8mbit"
"""Of a cable, so that steps take a second, and a gather a few."""
_LOOK_SECONDS = 0.002

Files = Mapping[tuple[str, str, str], int]
"""Inodes of files, by host, tag and name: a file that was brought anew has another."""


@dataclass(frozen=True)
class Apart:
    """A cluster whose hosts share nothing, and the run."""

    cluster: Cluster
    stage: Stage
    kept: Path
    """Where the disks are copied to."""

    def start(self, command: str = "train", options: tuple[str, ...] = TWO_NODES, name: str = RUN) -> Started:
        """Start it on the head, or go on with it."""
        return self.stage.start(command, name, options, root=Path(ROOT))

    def folder(self, name: str = RUN) -> Path:
        """Of the run, on the head."""
        return self.cluster.disk("head", f"{ROOT}/runs/{name}")

    def checkpoints(self, host: str) -> Path:
        """What a host has of them, the head's being the gathered copy; a folder that is not there where it has none."""
        if host == "head":
            return self.folder() / CHECKPOINTS
        found = self.cluster.disk(host, f"{SCRATCH}/runs").glob(f"{RUN}-*/{CHECKPOINTS}")
        return next(found, self.cluster.disk(host, SCRATCH) / "none")

    def tags(self, host: str) -> set[str]:
        """Names of those that a host has, or has begun."""
        return {path.name for path in self.checkpoints(host).glob("step-*")}

    def newest(self) -> str:
        """The newest that the head has gathered."""
        return sidecar.complete_tags(self.checkpoints("head"))[0]

    def files(self) -> Files:
        """Of all checkpoints, wherever they are, but for sidecars, which a gather writes anew each time."""
        paths = {host: self.checkpoints(host).glob("step-*/*.pt") for host in self.cluster.hosts}
        return {
            (host, path.parent.name, path.name): path.stat().st_ino for host, found in paths.items() for path in found
        }

    def resumed_from(self) -> list[str]:
        """The tag that the ranks of each attempt were told, "the start" where there was none."""
        specs = sorted((self.folder() / ATTEMPTS).glob(f"*/{ATTEMPT_SPEC}"))
        return [TrainJob.read(path).resume_tag or "the start" for path in specs]

    @property
    def is_over(self) -> bool:
        """Whether the head has what is left of a run that has come to its end."""
        return (self.folder() / WITNESS_FOLDER).exists()

    def await_saving(self, run: Started, host: str = "node1") -> str:
        """Wait until a node begins to save, be it a tag of which it has some already; which tag. Its rank is there."""
        folder, since = self.checkpoints(host), time.time_ns()
        await_truth(run, lambda: _newer(folder, since) is not None)
        return str(_newer(folder, since))

    def power_cycle(self) -> None:
        """All hosts lose power at once, and come back with their disks."""
        self._switch_off()
        for host in self.cluster.hosts:
            self.cluster.boot(host)

    def keep_disks(self) -> None:
        """Copy what the run has on each disk."""
        for host in self.cluster.hosts:
            for place in self._places(host):
                _copy(place, self.kept / place.relative_to(place.anchor))

    def put_disks_back(self) -> None:
        """All hosts come back with their disks as they were when they were copied."""
        self._switch_off()
        for host in self.cluster.hosts:
            for place in self._places(host):
                _copy(self.kept / place.relative_to(place.anchor), place)
            self.cluster.boot(host)

    def _switch_off(self) -> None:
        for host in reversed(self.cluster.hosts):
            self.cluster.power_cut(host)

    def _places(self, host: str) -> list[Path]:
        return [self.cluster.disk(host, place) for place in (ROOT, NODE_FOLDER)]


@contextmanager
def apart() -> Iterator[Apart]:
    """A head, two nodes and a spare, with text, vocabulary and token shards on the head."""
    with TemporaryDirectory() as folder, Cluster.temporary(f"resumes-{os.getpid()}", nodes=3) as cluster:
        prepared, kept = Path(folder, "prepared"), Path(folder, "kept")
        prepared.mkdir()
        stage = Stage(cluster, prepared, SETTINGS)
        prepare(prepared)
        _copy(prepared, cluster.disk("head", ROOT))
        yield Apart(cluster, stage, kept)


def interrupt(it: Apart) -> None:
    """Begin the run, and cut everybody's power once it has saved at least twice and all of that is gathered."""
    run = it.start()
    await_truth(run, lambda: bool(it.tags("node0")))
    it.cluster.set_rate("node0", SLOW)
    await_truth(run, lambda: len(it.tags("node0")) > 1 and it.tags("node0") == it.tags("node1") == _complete(it))
    it.power_cycle()
    run.wait(SECONDS)


def _complete(it: Apart) -> set[str]:
    return set(sidecar.complete_tags(it.checkpoints("head")))


def await_truth(run: Started, holds: Callable[[], bool]) -> None:
    """Wait for it; AssertionError with the run's output if the run ends before, or it takes too long."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        alive = run.process.poll() is None and time.monotonic() < deadline
        assert alive, f"it does not come: {run.log.read_text('utf-8', 'replace')[-4000:]}"
        time.sleep(_LOOK_SECONDS)


def require_success(ended: Ended) -> None:
    """AssertionError with the output of a command that failed."""
    assert ended.exit_code == 0, ended.output[-4000:]


def _newer(checkpoints: Path, since_ns: int) -> str | None:
    """Name of a tag whose folder has been made, or changed, since that time of day."""
    for folder in checkpoints.glob("step-*"):
        with suppress(FileNotFoundError):  # just taken away, for its tag to be saved anew
            if folder.stat().st_mtime_ns > since_ns:
                return folder.name
    return None


def _copy(source: Path, target: Path) -> None:
    """Make a folder what another is, times included; nothing where there is no other."""
    subprocess.run(["rm", "-rf", target], check=True)
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", source, target], check=True)
