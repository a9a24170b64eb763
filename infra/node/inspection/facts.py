"""The question that preflight asks a node, and the answer. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.node.messages import Query


@dataclass(frozen=True)
class Route:
    """The interface for packets to a network (in CIDR notation). Of several routes, the lowest metric wins."""

    network: str
    interface: str
    metric: int


@dataclass(frozen=True)
class Network:
    """How the node can be reached, and how it reaches others."""

    hostname: str
    hostname_addresses: list[str]
    """What its own name resolves to on the node; empty if it does not resolve."""
    ssh_address: str | None
    """The node's address in the head's ssh connection."""
    interfaces: dict[str, list[str]]
    """Addresses of each interface that is up, with the prefix: ``{"eth0": ["10.0.0.7/24"]}``."""
    routes: list[Route]
    master_addresses: list[str]
    """What the given master address resolves to on the node."""
    port: int | None
    """The port that the user set, or else a free one; None if no port was requested."""
    port_is_free: bool


@dataclass(frozen=True)
class Software:
    """The software of the node."""

    python: str
    machine: str
    """Processor architecture: ``x86_64``, ``aarch64``."""
    packages: dict[str, str]
    """Versions by name; empty for packages that are not installed."""
    runtime: dict[str, str]
    """Versions of ``cuda``, ``hip`` and ``xpu`` that torch was built for; empty for the CPU only."""
    code_digest: str
    spec_digest: str
    """Fingerprint of the run's whole spec as the node's code reads it, or why that code rejects it."""
    libgomp_error: str
    """The loader's error for torch's OpenMP library; empty if it can be loaded."""


@dataclass(frozen=True)
class Devices:
    """The node's accelerators, and the runs that hold them."""

    kind: str
    count: int
    used_bytes: dict[str, int]
    """Memory in use, by the number of the slot as text."""
    total_bytes: dict[str, int]
    held_by: dict[str, str]
    """The run of this user that holds a slot, by the number of the slot as text."""
    error: str
    """Why torch could not be queried; empty if it could."""


@dataclass(frozen=True)
class Build:
    """Whether DeepSpeed finds its compiled operators, or can compile them with the PATH of the node's ranks."""

    ninja: str | None
    compiler: str | None
    compiled: list[str]
    cleared_locks: list[str]
    """Locks that killed compiles had left, and that were removed now."""
    foreign_locks: list[str]
    """Locks of other users: they can make a start hang, and only these users can remove them."""
    shared_locks: list[str]
    """Locks on a disk that machines may share, so that a compile on another machine may hold them."""
    unwritable: dict[str, str] = field(default_factory=dict)
    """Folders of compiled operators that cannot be written, and why."""


@dataclass(frozen=True)
class Folder:
    """A folder of the node, and the disk that it is on."""

    path: str
    """Empty if it cannot be used at all."""
    error: str
    """Why it cannot be used or written, and what to do; empty if it can."""
    free_bytes: int
    free_inodes: int | None = None
    """How many more files and folders the disk can hold; None if it sets no limit or cannot be inspected."""


@dataclass(frozen=True)
class Resources:
    """Memory, disk space and file descriptors of the node."""

    memory_bytes: int
    open_files: int
    shared_memory_bytes: int
    """Size of /dev/shm; 0 if there is none."""
    shared_memory_free_bytes: int
    nonce: str | None
    """The contents of the file that the head wrote under the root; None if the node cannot read it."""
    root: Folder
    node_folder: Folder
    scratch: Folder = Folder("", "", 0)
    """Inspected on the head's machine, and on nodes that cannot read the head's file; else empty."""
    scratch_mark: str = ""
    """A random mark in the scratch folder, which shows whether two hosts share that folder."""
    scratch_yielding_bytes: int = 0
    """Bytes in it that are available to the run: its own checkpoints, and staged folders that no other run uses."""


@dataclass(frozen=True)
class Facts:
    """A node's answer."""

    started_at: float
    ended_at: float
    """The node's clock, in seconds since 1970, when it began to collect the facts and when it finished."""
    identity: str
    """Equal for two names of one machine. Containers with separate networks count as separate machines."""
    network: Network
    software: Software
    devices: Devices
    build: Build
    resources: Resources


@dataclass(frozen=True)
class Question(Query[Facts]):
    """What the head asks of one node."""

    action = "facts"
    root: Path
    nonce_path: Path
    """A file under the root that the head has just written."""
    scratch: Path | None = None
    """``storage.scratch``, for nodes that cannot read that file; None for the default folder."""
    head: str = ""
    """Identity of the head's machine. It can read that file, but its ranks may still write to its own disk."""
    run_on_nodes: str | None = None
    """The run's name on nodes; None if the run has not begun."""
    accelerator: str | None = None
    """DeepSpeed's name for the accelerator; None to detect it."""
    slots: tuple[int, ...] = ()
    """The accelerators of the node that its ranks will use."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that ranks will get from the head."""
    spec: str = ""
    """The run's spec as JSON; empty if there is none."""
    master_address: str | None = None
    """Name or address that the user set for the rendezvous; sent to the first host only."""
    wants_port: bool = False
    """Whether this is the first host, which serves the rendezvous."""
    master_port: int | None = None
    """The port that the user set for the rendezvous."""
