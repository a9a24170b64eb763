"""What a node is asked, and what it answers: JSON both ways; standard library only."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Question:
    """What the head asks of one node."""

    root: str
    nonce_path: str
    """A file under the root that the head has just written."""
    scratch: str | None = None
    """Folder on the node's own disk, where that file is not there; the default one when None."""
    head: str = ""
    """Identity of the head's machine, which has that file and yet a disk of its own for what its ranks write."""
    run_on_nodes: str | None = None
    """The run's name there, once it was begun."""
    accelerator: str | None = None
    """DeepSpeed's name for it; the node finds it when None."""
    slots: list[int] = field(default_factory=list)
    """Accelerators of the node that its ranks are to use."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that ranks get from the head."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The run's, as JSON; empty for none."""
    master_address: str | None = None
    """Name or address that was given for the meeting of the ranks; asked of the first host only."""
    wants_port: bool = False
    """Whether this is the first host, where the ranks meet."""
    master_port: int | None = None
    """The port that was given for that."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of ``dataclasses.asdict``."""
        return cls(**values)


@dataclass(frozen=True)
class Route:
    """Where packets for a network go: ``network`` is in CIDR notation; the smaller ``metric`` wins."""

    network: str
    interface: str
    metric: int


@dataclass(frozen=True)
class Network:
    """How the node is reached, and how it reaches others."""

    hostname: str
    hostname_addresses: list[str]
    """What its own name resolves to there; empty when it does not."""
    ssh_address: str | None
    """The node's address at the end of the head's ssh."""
    interfaces: dict[str, list[str]]
    """Addresses of each interface that is up, with the prefix: ``{"eth0": ["10.0.0.7/24"]}``."""
    routes: list[Route]
    master_addresses: list[str]
    """What the given master address resolves to there."""
    port: int | None
    """Where asked for: the port that was given, or a free one."""
    port_is_free: bool


@dataclass(frozen=True)
class Software:
    """What runs there."""

    python: str
    machine: str
    """Kind of processor: ``x86_64``, ``aarch64``."""
    packages: dict[str, str]
    """Versions; an empty text for what is not installed."""
    runtime: dict[str, str]
    """What torch was built for, of ``cuda``, ``hip`` and ``xpu``; empty for the CPU."""
    code_digest: str
    spec_digest: str
    """Fingerprint of the run's whole spec as the node's code reads it; or why it cannot."""
    libgomp_error: str
    """What the loader says of torch's OpenMP library; empty when it can be loaded."""


@dataclass(frozen=True)
class Devices:
    """Accelerators, where torch was asked for them, and who holds them."""

    kind: str
    count: int
    used_bytes: dict[str, int]
    """Memory in use on each slot, by its number as text."""
    total_bytes: dict[str, int]
    held_by: dict[str, str]
    """Runs of ours that hold a slot."""
    error: str
    """Why torch could not say; empty when it could."""


@dataclass(frozen=True)
class Build:
    """Whether DeepSpeed finds or can make its compiled operators, with the PATH that ranks have there."""

    ninja: str | None
    compiler: str | None
    compiled: list[str]
    cleared_locks: list[str]
    """Left by killed compiles, and now removed."""
    foreign_locks: list[str]
    """Of other users: they can hang a start, and only these users can remove them."""
    shared_locks: list[str]
    """On a disk that machines share: a compile on another one may hold them."""


@dataclass(frozen=True)
class Room:
    """What there is of memory, disks and descriptors."""

    memory_bytes: int
    open_files: int
    nonce: str | None
    """What the head's file holds; None where it is not there."""
    shared_memory_bytes: int
    """Size of /dev/shm; 0 where there is none."""
    shared_memory_free_bytes: int
    root_error: str
    """Why nothing can be written under the root; empty when it can."""
    root_free_bytes: int
    node_folder: str
    node_folder_error: str
    """Why it is of no use, and what to do; empty when it can be written."""
    node_folder_free_bytes: int
    scratch: str = ""
    """Where the head's file is not there: the folder on the node's own disk."""
    scratch_mark: str = ""
    """What it was given when it was made, so that two hosts with one folder are found out."""
    scratch_error: str = ""
    """Why it is of no use, and what to do; empty when it can be written."""
    scratch_free_bytes: int = 0
    scratch_yielding_bytes: int = 0
    """What lies there and gives way to the run: its own checkpoints, and what was staged and no other run uses."""


@dataclass(frozen=True)
class Facts:
    """A node's answer."""

    started_at: float
    ended_at: float
    """The node's clock, in seconds since 1970, when it began to gather and when it had done."""
    identity: str
    """The same for two names of one machine; two containers with networks of their own are two machines."""
    network: Network
    software: Software
    devices: Devices
    build: Build
    room: Room

    def to_json(self) -> dict[str, Any]:
        """Builtin types only."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        network = values["network"]
        return cls(
            started_at=values["started_at"],
            ended_at=values["ended_at"],
            identity=values["identity"],
            network=Network(**{**network, "routes": [Route(**route) for route in network["routes"]]}),
            software=Software(**values["software"]),
            devices=Devices(**values["devices"]),
            build=Build(**values["build"]),
            room=Room(**values["room"]),
        )
