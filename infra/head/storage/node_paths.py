"""A run on nodes with their own disks: its names and paths there, and the job that its ranks read."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from infra.head.hosts.code_shipping import shipped_code
from infra.head.hosts.hostfile import Host, Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Transport
from infra.node.attempts.attempt import now
from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import name_on_nodes, node_path, run_path, shards_path, staged_path
from t5train.files.run_folder import CHECKPOINTS
from t5train.spec import RunSpec, StorageSpec
from t5train.spec.rank_job import Consolidated, StartingModel, TrainJob


@dataclass(frozen=True)
class NodeRun:
    """One run, on the head and on its nodes."""

    name: str
    """Name on nodes. It has the fingerprint, so that a run of this name with other settings does not find its files."""
    folder: Path
    """Folder on the head."""
    hosts: Hosts
    nodes: Nodes
    keep: StorageSpec
    """Which checkpoints to keep."""
    owner: Owner
    """The owner of the run's files on nodes."""
    checkpoint_bytes: Mapping[str, int] = field(default_factory=dict)
    """Disk space that the checkpoints need on each host."""

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        run_fingerprint: str,
        unique_id: str,
        hosts: Hosts,
        transport: Transport,
        checkpoint_bytes: Mapping[str, int],
    ) -> Self:
        """Return the run of these settings."""
        return cls(
            name=name_on_nodes(spec.run_name, run_fingerprint),
            folder=spec.run_folder,
            hosts=hosts,
            nodes=Nodes(transport, hosts.names, spec.storage.scratch, shipped_code(spec.cluster), unique_id),
            keep=spec.storage,
            owner=Owner(unique_id, socket.gethostname(), str(spec.storage.root), now(), spec.cluster.lease_seconds),
            checkpoint_bytes=checkpoint_bytes,
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the gathered copies on the head."""
        return self.folder / CHECKPOINTS

    @property
    def relative_path(self) -> str:
        """Path of the run relative to the scratch folder of each node."""
        return run_path(self.name)

    @property
    def first(self) -> str:
        """The host of rank 0, the only rank that writes metrics and the witness."""
        return self.hosts.names[0]

    def ranks_of(self, host: Host) -> range:
        """Return the global ranks of a host."""
        return dict(zip(self.hosts.all, self.hosts.ranks(), strict=True))[host]

    def job_on_nodes(self, job: TrainJob) -> TrainJob:
        """Return the job as ranks on nodes read it: with the paths there."""
        changes = {
            "node_local": True,
            "run_folder": self._on_node(self.relative_path),
            "shards_folder": self._on_node(path_of_shards(job)),
        }
        if job.consolidated is not None:
            folder = self._on_node(path_of_consolidated(job.consolidated))
            changes["consolidated"] = job.consolidated.model_copy(update={"folder": folder})
        if (model := job.begins_from) is not None:
            start = {"start_from": str(self._on_node(path_of_start(model)))}
            changes["spec"] = job.spec.model_copy(update={"model": job.spec.model.model_copy(update=start)})
        return job.model_copy(update=changes)

    def _on_node(self, name: str) -> Path:
        return (self.nodes.scratch or node_path("scratch")) / name


def path_of_shards(job: TrainJob) -> str:
    """Return where token shards are staged."""
    return shards_path(job.shards_folder.name)


def path_of_consolidated(consolidated: Consolidated) -> str:
    """Return where the consolidated form of a checkpoint with another layout is staged."""
    return staged_path(consolidated.folder.name, consolidated.fingerprint)


def path_of_start(model: StartingModel) -> str:
    """Return where a model to start from is staged."""
    return staged_path(model.folder.name, model.fingerprint)
