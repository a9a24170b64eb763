"""Chooses, from all evidence of a failed attempt, the one error to raise and the hosts to blame.

Ranks and the launcher leave evidence in their files (infra.head.launch.rank_evidence); a host gives it by what it
reports (infra.head.launch.supervision), or by its silence.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from t5train.errors import HostLost, T5TrainError


class Hops(IntEnum):
    """How far a kind of evidence is from the cause of a failure."""

    OWN = 0
    """A rank, a host or this machine failed by itself."""
    LOST = 1
    """A host and the head had no contact for longer than the lease."""
    UNEXPLAINED = 2
    """A rank exited, and nothing says why. It may have lost a host that has been silent for all of the lease."""
    SILENT = 3
    """The attempt could not be ended on a host. Its silence may have begun only then."""
    LAUNCHER_FIRST = 4
    """The launcher on the head ended before any rank failed."""
    DEADLINE = 5
    """A rank took too long. On a GPU, so does one that waits for another rank."""
    WAITED = 6
    """A rank timed out in a collective."""
    PARENT = 7
    """The launcher on a rank's host was gone, as it also is once another of its ranks has failed."""
    LOST_PEER = 8
    """A rank lost its connection to another one."""
    PREEMPTED = 9
    """A rank was asked to end. The launcher also does that once another rank has failed."""
    LAUNCHER = 10
    """The launcher on the head ended: the head ends it in any case."""


_ABSENT = (Hops.LOST, Hops.SILENT)
_AMBIGUOUS = (Hops.UNEXPLAINED, Hops.DEADLINE)
"""If several hosts have such evidence, what they share may be at fault, such as the code or the network."""


@dataclass(frozen=True)
class Evidence:
    """Something observed of a failed attempt, and the error to raise if it is the cause."""

    error: T5TrainError
    hops: Hops
    at: str = ""
    """When it happened, as ``attempt.now`` returns it; empty, which sorts first, if only hops matter."""
    hosts: tuple[str, ...] = ()
    """The hosts to blame if it is the cause."""


def verdict(evidence: Iterable[Evidence], hosts: Collection[str] = ()) -> T5TrainError:
    """Return the error of the evidence with the fewest hops; of several, the earliest. It has the hosts to blame.

    ``evidence`` includes that of the launcher; ``hosts`` are all hosts of the attempt. Absent and restarted hosts are
    always named. They are blamed only if nothing nearer explains the failure. If several hosts are all absent, none is
    blamed: most likely, this machine's network failed.
    """
    cause, *others = sorted(evidence, key=lambda each: (each.hops, each.at))
    lost = (each for each in others if isinstance(each.error, HostLost))
    absent = {host: each for each in lost for host in each.hosts if host not in cause.hosts}
    named = "; ".join(str(each.error) for each in absent.values())
    if not isinstance(cause.error, HostLost):
        text = f"{cause.error}\nAlso seen, but not the cause: {named}" if absent else str(cause.error)
        alike = {each.hosts for each in others if each.hops == cause.hops} - {cause.hosts}
        return type(cause.error)(text, () if alike and cause.hops in _AMBIGUOUS else cause.hosts)
    text = f"{cause.error}; {named}" if absent else str(cause.error)
    blamed = (*cause.hosts, *absent)
    if len(hosts) > 1 and cause.hops in _ABSENT and set(blamed) >= set(hosts):
        return HostLost(f"{text}. All hosts were lost at once, so check this machine and its network first")
    if cause.hops == Hops.SILENT:
        reported = next(str(each.error) for each in others if each.hops not in _ABSENT)
        text = f"{text}. The other hosts reported: {reported}"
    return HostLost(text, blamed)
