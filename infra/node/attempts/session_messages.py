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
    """Open a session for an attempt."""

    action = "watch"
    run_id: str
    offsets: Offsets | None
    """Where to continue its logs, as in LogTails."""


class Order(StrEnum):
    """What the node is to do."""

    RENEW = "renew"
    """Renew the lease."""
    STOP = "stop"
    """Make the ranks save and end."""
    END = "end"
    """End the ranks at once."""


@dataclass(frozen=True)
class Instruction:
    """An order of the head."""

    order: Order


class Report:
    """What the node reports."""


@dataclass(frozen=True)
class Hello(Report):
    """The first report."""

    host: str
    boot_id: str
    offsets: Offsets


@dataclass(frozen=True)
class LeaseNotRenewed(Report):
    """The disk of the node's own folder failed."""

    reason: str


@dataclass(frozen=True)
class RankError(Report):
    """The error that a rank has reported: the name of its class in t5train.errors, and its message."""

    name: str
    """Of the rank."""
    kind: str
    message: str


@dataclass(frozen=True)
class RankEnded(Report):
    """A rank has ended."""

    record: ExitRecord


@dataclass(frozen=True)
class Saved(Report):
    """Ranks have written more sidecars to the node's own disk."""

    count: int


class RankLine(NamedTuple):
    """A line of a rank's log."""

    name: str
    """Of the rank."""
    text: str


@dataclass(frozen=True)
class NewLines(Report):
    """Lines of logs."""

    lines: tuple[RankLine, ...]
    left_out: int
    """How many more there were."""
    offsets: Offsets
    """Where to continue."""


@dataclass(frozen=True)
class Alive(Report):
    """Sent at least once a second. The guards of these ranks have ended without an exit record."""

    gone: tuple[str, ...]


@dataclass(frozen=True)
class Ended(Report):
    """The last report: the attempt has ended, or the node has no record of it."""

    left: tuple[int, ...]
    """Pids that survived SIGKILL."""
