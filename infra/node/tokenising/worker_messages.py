"""What the head and a host say to each other to start a worker of Dask."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from infra.node.messages import Request


@dataclass(frozen=True)
class Credentials:
    """The certificate of a run, which is its own authority, and its private key, both as PEM.

    Whoever holds the key belongs to the run. It is sent on stdin only, and never printed.
    """

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True)
class Makers:
    """What the bytes of shards depend on, so the head and all hosts must have the same."""

    code: str
    """The digest of this project's code."""
    versions: Mapping[str, str]
    """The versions of Python and of packages; empty for a package that is missing."""


@dataclass(frozen=True)
class WorkerStart(Request):
    """Starts a conversation: a worker for the scheduler that listens on ``port`` of the head, until stdin ends."""

    action: ClassVar[str] = "tokenise"
    name: str
    """The host's name on the head."""
    port: int
    credentials: Credentials
    lease_seconds: float
    """After this time without contact, the worker and the scheduler give each other up."""
    makers: Makers
    """Those of the head."""
    umask: int
    """The umask of the head, with which files of shards are created."""
    processes: int | None
    """How many shards are made at the same time; None: one per core."""
    probe: Path
    """A file in the folder of the shards that the head has just written."""
    nonce: str
    """The content of that file."""
    sources: Mapping[str, int]
    """The files with the text, each with its size on the head."""


@dataclass(frozen=True)
class WorkerReady:
    """The worker has joined the scheduler."""

    processes: int
    is_compiled: bool
    """Whether the segmenter is compiled on this host."""
