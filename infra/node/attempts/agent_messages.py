"""The messages of a control channel: what the head orders, and what the agent on a node reports.

Standard library only, as nodes import it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from infra.node.attempts.exit_record import ExitRecord
from infra.node.attempts.log_tail import Offsets
from infra.node.attempts.run_ownership import Claimed, ClaimRun
from infra.node.messages import Request


@dataclass(frozen=True)
class Serve(Request):
    """Start an agent."""

    action = "serve"
    lease_seconds: float
    """The agent ends if it gets no message for longer than this."""


class Instruction:
    """Base class of the messages with which the head instructs the agent."""


@dataclass(frozen=True)
class Watch(Instruction):
    """Watch an attempt from now on, and no other."""

    run_id: str
    offsets: Offsets | None
    """Where to continue reading its logs, as in LogTails."""


@dataclass(frozen=True)
class Renew(Instruction):
    """Renew the leases of the watched attempt and of the run."""

    run_id: str | None
    """Run id of the attempt, or None to watch it no longer."""
    claim: ClaimRun | None
    """The head's claim to the run's files. ClaimRenewed or ClaimNotRenewed answers it."""


class Order(StrEnum):
    """What is to happen to the watched attempt."""

    STOP = "stop"
    """Make the ranks save and end."""
    END = "end"
    """End the ranks at once."""


@dataclass(frozen=True)
class Ordered(Instruction):
    """The message that carries an order of the head."""

    order: Order


class Report:
    """Base class of the messages with which the agent reports."""


@dataclass(frozen=True)
class ClaimRenewed(Report):
    """The claim was renewed, unless another head owns the run's files here."""

    claimed: Claimed


@dataclass(frozen=True)
class ClaimNotRenewed(Report):
    """The claim could not be renewed, because the disk of the run's files failed."""

    reason: str


@dataclass(frozen=True)
class Hello(Report):
    """The first report about an attempt."""

    run_id: str
    boot_id: str
    offsets: Offsets


@dataclass(frozen=True)
class NotWatched(Report):
    """The attempt is watched no longer, because its folder cannot be read."""

    run_id: str
    reason: str


@dataclass(frozen=True)
class LeaseNotRenewed(Report):
    """The attempt's lease could not be renewed, because the disk of the node folder failed."""

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
    """Sent at least once a second, also if no attempt is watched, to show that the node is alive."""

    gone: tuple[str, ...]
    """Names of the ranks whose guards have ended without an exit record."""


@dataclass(frozen=True)
class Ended(Report):
    """The last report about an attempt: it has ended, or the node has no record of it."""

    left: tuple[int, ...]
    """Pids that survived SIGKILL."""
