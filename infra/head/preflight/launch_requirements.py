"""What a launch requires of its hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from infra.head.hosts.code_shipping import path_to, shipped_code
from infra.head.hosts.hostfile import Hosts
from infra.head.hosts.nodes import OWN_PYTHON
from infra.node.attempts.rank_environment import settings_of_head
from infra.node.attempts.shared_memory import RANK_BYTES
from infra.node.inspection.hardware import CPU
from infra.node.node_folders import name_on_nodes
from t5train.checkpoint.resume import begun_fingerprint
from t5train.checkpoint.retention import bytes_held
from t5train.engine.memory_estimate import host_bytes
from t5train.model.model_shape import T5Shape
from t5train.spec import RunSpec


@dataclass(frozen=True)
class LaunchRequirements:
    """Requirements of all hosts together, and of each host."""

    slots: Mapping[str, tuple[int, ...]]
    """Accelerators that the ranks of each host use, in the hostfile's order. The rendezvous is on the first host."""
    root: Path
    scratch: Path | None = None
    """Folder on each node's own disk, used if it does not share the root."""
    node_local: bool = False
    """Whether ``scratch`` is used even if the nodes share the root."""
    accelerator: str | None = None
    """DeepSpeed's name of the accelerator; if None, it is detected on the nodes."""
    code: str | None = None
    """Digest of this process's code, which is shipped to the hosts; None if the code is installed there."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that ranks get from the head."""
    spec: str = ""
    """The run's settings, as JSON; empty if there is no run."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Host memory that the ranks of each host need."""
    shared_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of /dev/shm that the collectives of each host's ranks need."""
    checkpoint_bytes: Mapping[str, int] = field(default_factory=dict)
    """Disk space for the checkpoints of each host's ranks on its own disk, if it does not share the root."""
    staged_bytes: int = 0
    """Size of the token shards that are staged to each host, if it does not share the root."""
    tokenises: bool = False
    """Whether the hosts are still to tokenise the text, for which they need Dask and have to share the root."""
    run_on_nodes: str | None = None
    """The run's name on nodes, once it has begun."""
    operators: tuple[str, ...] = ()
    """DeepSpeed's compiled operators that ranks load."""
    master_address: str | None = None
    master_port: int | None = None
    launcher: str = "pdsh"
    python: Sequence[str] = OWN_PYTHON
    """Command of Python on the hosts, for checks before a run; launches need it at the same path as here."""

    @classmethod
    def of_run(
        cls, spec: RunSpec, hosts: Hosts, shape: T5Shape, staged_bytes: int = 0, *, tokenises: bool = False
    ) -> Self:
        """Return the requirements of a run with this model shape and ``staged_bytes`` of token shards.

        ``tokenises`` is as in the fields: once the token shards exist, hosts need nothing that makes them.
        """
        cluster, begun = spec.cluster, begun_fingerprint(spec.run_folder)
        ranks = dict(zip(hosts.names, hosts.ranks(), strict=True))
        return cls(
            slots={host.name: host.slots for host in hosts.all},
            root=spec.storage.root,
            scratch=spec.storage.scratch,
            node_local=spec.storage.node_local,
            accelerator=cluster.accelerator,
            code=shipped_code(cluster),
            environment=settings_of_head(cluster.environment) | path_to(shipped_code(cluster)),
            spec=spec.model_dump_json(),
            memory_bytes={host: host_bytes(spec, shape, its) for host, its in ranks.items()},
            shared_memory_bytes=_shared_memory(spec, hosts),
            checkpoint_bytes={host: bytes_held(spec, shape, its) for host, its in ranks.items()},
            staged_bytes=staged_bytes,
            tokenises=tokenises,
            run_on_nodes=name_on_nodes(spec.run_name, begun) if begun else None,
            operators=operators_of(spec),
            master_address=cluster.master_address,
            master_port=cluster.master_port,
            launcher=cluster.launcher,
        )

    @property
    def first(self) -> str:
        """The host of the rendezvous."""
        return next(iter(self.slots))

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(len(slots) for slots in self.slots.values())


def _shared_memory(spec: RunSpec, hosts: Hosts) -> dict[str, int]:
    """DeepSpeed's collectives on the CPU use shared memory only if all ranks are on one host."""
    if spec.cluster.accelerator != CPU or len(hosts.all) > 1:
        return {}
    return {host.name: len(host.slots) * RANK_BYTES for host in hosts.all}


def operators_of(spec: RunSpec) -> tuple[str, ...]:
    """Return the operators that DeepSpeed compiles for ranks on the CPU, and for an optimizer in host memory."""
    of_cpu = ("deepspeed_shm_comm",) if spec.cluster.accelerator == "cpu" else ()
    return (*of_cpu, *(("cpu_adam",) if spec.layout.offload != "none" else ()))
