"""What the head and a host say to each other during an installation, each a line of JSON as in infra.node.messages."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What to install: the wheels (name, size, sha256) of the wheelhouse with that digest, into which folder."""

    user: int
    store: str
    into: str
    python: str
    wheelhouse: str
    unpacked_bytes: int
    wheels: list[tuple[str, int, str]]


class Reply:
    """A line for the head."""


@dataclass(frozen=True)
class Wanted(Reply):
    """From which byte the head must send these wheels, in this order."""

    starts: dict[str, int]


@dataclass(frozen=True)
class Working(Reply):
    """What the host does now."""

    what: str


@dataclass(frozen=True)
class Ended(Reply):
    """The environment is there; ``is_new`` if it was not before."""

    is_new: bool


@dataclass(frozen=True)
class Refused(Reply):
    """Why there is no environment, and what to do."""

    reason: str


class Refusal(Exception):
    """Ends the installation with a reason for the user."""


def reply(message: Reply) -> None:
    """Send a line to the head."""
    sys.stdout.write(json.dumps({type(message).__name__: vars(message)}) + "\n")
    sys.stdout.flush()


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file or folder. The kernel releases it however this process ends.

    Raises Refusal if the file was removed by the process that held the lock before.
    """
    # NFS locks only files that are open for writing.
    descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reply(Working(f"waiting for {what}"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not _is_at(path, descriptor):
            raise Refusal(f"waited for {what}, which failed. Repeat the command")
        yield
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
