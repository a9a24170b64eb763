"""Findings of the checks: lines that name the hosts, the values and the remedy."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infra.node.inspection.facts import Facts

_MOST_NAMES = 8


@dataclass(frozen=True)
class Finding:
    """One line about one check: a problem, or a note."""

    check: str
    text: str
    is_problem: bool = True
    hosts: tuple[str, ...] = ()
    """The hosts that did not answer."""
    is_transient: bool = False
    """Whether this failure may be transient: these hosts may answer later."""


@dataclass(frozen=True)
class HostReply:
    """A node's facts, and the time on the head's clock when it asked and when it was answered."""

    facts: Facts
    asked_at: float
    answered_at: float


HostReplies = Mapping[str, HostReply]
"""Replies by host name, in the hostfile's order."""


def names(hosts: list[str]) -> str:
    """``node1, node2``; of many hosts, the first few and how many more there are."""
    more = len(hosts) - _MOST_NAMES
    return ", ".join(hosts[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def of_each(replies: HostReplies, complaint: Callable[[str, Facts], str | None]) -> Iterator[str]:
    """Yield the text that ``complaint`` returns for each host. Hosts with the same text share a line."""
    groups: dict[str, list[str]] = {}
    for host, reply in replies.items():
        if (text := complaint(host, reply.facts)) is not None:
            groups.setdefault(text, []).append(host)
    return (f"{names(hosts)}: {text}" for text, hosts in groups.items())


class Outlier(NamedTuple):
    """Hosts whose value differs from that of most hosts."""

    hosts: list[str]
    value: str
    rest: str
    """What to call the hosts that have the right value."""
    right: str


def outliers(values: Mapping[str, str], preferred: str | None = None) -> Iterator[Outlier]:
    """Yield the hosts whose value differs from the right one, which is the most frequent value.

    If several values are equally frequent, ``preferred`` is right if it is among them, and otherwise the first.
    """
    counts = Counter(values.values())
    right = max(counts, key=lambda value: (counts[value], value == preferred), default="")
    rest = "others" if len(counts) == 2 else "most"
    for value in counts:
        if value != right:
            yield Outlier([host for host, its in values.items() if its == value], value, rest, right)
