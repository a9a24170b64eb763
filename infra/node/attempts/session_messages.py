"""The messages of a host session: what the head orders, and what a node reports about an attempt's ranks.

Standard library only, as nodes import it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from infra.node.attempts.exit_record import ExitRecord
from infra.node.attempts.log_tail import Offsets
from infra.node.messages import Request


@dataclass(frozen=True)
class Watch(Request):
    """Open a host session for an attempt."""

    action = "watch"
    run_id: str
    offsets: Offsets | None
    """Where to continue reading its logs, as in LogTails."""


class Order(StrEnum):
    """What the head orders the node to do."""

    RENEW = "renew"
    """Renew the lease."""
    STOP = "stop"
    """Make the ranks save and end."""
    END = "end"
    """End the ranks at once."""


@dataclass(frozen=True)
class Instruction:
    """The message that carries an order of the head."""

    order: Order


class Report:
    """Base class of the messages with which the node reports."""


@dataclass(frozen=True)
class Hello(Report):
    """The first report."""

    boot_id: str
    offsets: Offsets


@dataclass(frozen=True)
class LeaseNotRenewed(Report):
    """The lease could not be renewed, because the disk of the node folder failed."""

    reason: str


@dataclass(frozen=True)
class RankError(Report):
    """A rank has reported an error."""

    name: str
    """Name of the rank."""
    kind: str
    """Name of the error's class in t5train.errors."""
    message: str


@dataclass(frozen=True)
class RankEnded(Report):
    """A rank has ended."""

    record: ExitRecord


@dataclass(frozen=True)
class RankPhase(Report):
    """What rank 0 is doing. The host that it runs on sends this about once a second."""

    phase: str
    """As in t5train.files.heartbeat."""
    step: int
    seconds: float
    """How long the phase has lasted."""
    limit_seconds: float
    """How long it may take."""


@dataclass(frozen=True)
class Saved(Report):
    """Ranks have written more sidecars to the node's own disk."""

    count: int


class RankLine(NamedTuple):
    """A line of a rank's log."""

    name: str
    """Name of the rank."""
    text: str


@dataclass(frozen=True)
class NewLines(Report):
    """New lines of the ranks' logs."""

    lines: tuple[RankLine, ...]
    left_out: int
    """How many more new lines were not sent."""
    offsets: Offsets
    """Where to continue reading."""


@dataclass(frozen=True)
class Alive(Report):
    """Sent at least once a second, to show that the node is alive."""

    gone: tuple[str, ...]
    """Names of the ranks whose guards have ended without an exit record."""


@dataclass(frozen=True)
class Ended(Report):
    """The last report: the attempt has ended, or the node has no record of it."""

    left: tuple[int, ...]
    """Pids that survived SIGKILL."""
