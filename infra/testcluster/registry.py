"""Clusters of this machine by name: their folders, and how to end them even if the process that started them is gone.

Every process of a cluster has the cluster's mark in its environment, or runs in a namespace whose first process has it.
When these processes end, the kernel removes the namespaces, mounts and cables, so only the folder is left to remove.
"""

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.node import processes
from infra.node.processes import RUN_ID_VARIABLE, ProcessIdentity
from t5train.errors import TestClusterError
from t5train.files.atomic import write_json

FOLDER = Path("/var/tmp/t5-testcluster")  # noqa: S108 - private, and hidden from hosts by their own /var/tmp
_STATE, _SWITCH = "cluster.json", "switch.json"


@dataclass(frozen=True)
class State:
    """How a cluster was started, and by which process."""

    nodes: int
    share: str | None
    temporary: bool
    environment: dict[str, str]
    creator: ProcessIdentity


def folder(name: str) -> Path:
    """The folder of a cluster's disks and state. Raises TestClusterError if the name is invalid."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", name):
        raise TestClusterError(
            f"{name!r} is not a valid name of a test cluster: use up to 40 of the characters a-z, 0-9 and -, the first "
            "not -"
        )
    return FOLDER / name


def mark(name: str) -> dict[str, str]:
    """The environment variable that marks the processes of a cluster."""
    return {RUN_ID_VARIABLE: f"testcluster-{name}"}


def create(name: str, state: State) -> None:
    """Remove abandoned clusters, then make a cluster's folder. Raises TestClusterError if the name is taken."""
    path = folder(name)
    with _alone():
        _remove_abandoned()
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            remedy = f"end it (python -m infra.testcluster down --name {name}) or choose another --name"
            raise TestClusterError(f"a test cluster {name!r} already exists: {remedy}") from None
        write_json(path / _STATE, asdict(state))


def read(name: str) -> State:
    """How a cluster was started. Raises TestClusterError if there is none of that name."""
    try:
        state = json.loads((folder(name) / _STATE).read_text("utf-8"))
    except FileNotFoundError:
        raise TestClusterError(
            f"there is no test cluster {name!r}: start it with python -m infra.testcluster up"
        ) from None
    return State(**{**state, "creator": ProcessIdentity(**state["creator"])})


def write_switch(name: str, switch: ProcessIdentity) -> None:
    """Record the process that holds the cluster's network."""
    write_json(folder(name) / _SWITCH, asdict(switch))


def read_switch(name: str) -> ProcessIdentity:
    """The process that holds the cluster's network."""
    return ProcessIdentity(**json.loads((folder(name) / _SWITCH).read_text("utf-8")))


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process at a time make and remove folders of clusters: two could find the same abandoned cluster."""
    FOLDER.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(FOLDER / ".lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def end(name: str) -> None:
    """End a cluster, whatever state it is in, and remove its folder with all disks."""
    with _alone():
        _end(name)


def _end(name: str) -> None:
    left = processes.end(_belongs(name), grace_seconds=0)
    if left:
        raise TestClusterError(f"processes of test cluster {name!r} survived SIGKILL: {' '.join(map(str, left))}")
    if folder(name).exists():
        shutil.rmtree(folder(name))


def _belongs(name: str) -> processes.Belongs:
    (value,) = mark(name).values()
    return processes.in_run(value)


def _remove_abandoned() -> None:
    """Remove clusters that ended with their creator or with the machine."""
    for path in FOLDER.glob(f"*/{_STATE}"):
        name = path.parent.name
        if not read(name).creator.is_alive() and not processes.find(_belongs(name)):
            _end(name)
