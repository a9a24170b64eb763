"""Reads DeepSpeed's hostfile, and the options that choose hosts from it, more strictly than DeepSpeed.

DeepSpeed silently drops a host with ``slots=0``, lets pdsh expand ``node[0-1]``, and passes a name such as
``-oProxyCommand=x`` to ssh as an option. Names are therefore restricted to plain host names and IPv4 addresses. IPv6
addresses are rejected, because DeepSpeed and pdsh interpret their colons differently: a host with an IPv6 address needs
a name in /etc/hosts or in ssh's configuration.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from t5train.errors import SpecError
from t5train.files.os_errors import explain
from t5train.quantities import quantity
from t5train.spec import ClusterSpec

MAX_SLOTS = 1024
_NAME = re.compile("[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LINE = re.compile(r"(\S+)[ \t]+slots=([0-9]{1,9})")


@dataclass(frozen=True)
class Host:
    """A machine, under the name that ssh uses, and the accelerators to use on it."""

    name: str
    slots: tuple[int, ...]
    """Ids of accelerators, ascending; the rank with LOCAL_RANK i uses the i-th."""


@dataclass(frozen=True)
class Hosts:
    """All hosts of a run in the order of their ranks: the ranks of the first host come first."""

    all: tuple[Host, ...]

    @classmethod
    def of(cls, slots_by_name: Mapping[str, Iterable[int]]) -> Self:
        """Hosts with these names and slots, in this order."""
        return cls(tuple(Host(name, tuple(slots)) for name, slots in slots_by_name.items()))

    @property
    def num_ranks(self) -> int:
        """Number of ranks: one for each slot of each host."""
        return sum(len(host.slots) for host in self.all)

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names."""
        return tuple(host.name for host in self.all)

    def ranks(self) -> Iterator[range]:
        """Global ranks of each host."""
        first = 0
        for host in self.all:
            yield range(first, first := first + len(host.slots))


def read_hosts(cluster: ClusterSpec) -> Hosts:
    """Return the chosen hosts. Raises SpecError as ``chosen_hosts`` does, and if their number of ranks has changed."""
    hosts = chosen_hosts(cluster)
    if hosts.num_ranks != cluster.ranks:
        raise SpecError(
            f"cluster.ranks is {cluster.ranks}, but the hosts now chosen from {cluster.hostfile} have "
            f"{quantity(hosts.num_ranks, 'slot')}: the hostfile has changed. Start the run again to continue it on "
            "these hosts"
        )
    return hosts


def chosen_hosts(cluster: ClusterSpec) -> Hosts:
    """Return the hosts that the settings choose for training. Raises SpecError with the line or setting to correct."""
    found = _listed(cluster)
    if cluster.spares >= len(found.all):
        raise SpecError(
            f"cluster.spares is {cluster.spares}, of {quantity(len(found.all), 'host')} chosen. Leave at least one to "
            "train"
        )
    return Hosts(found.all[: len(found.all) - cluster.spares])


def spare_hosts(cluster: ClusterSpec) -> Hosts:
    """Return the spares: the last ``cluster.spares`` of the listed hosts. Raises SpecError as ``chosen_hosts`` does."""
    return Hosts(_listed(cluster).all[len(chosen_hosts(cluster).all) :])


def _listed(cluster: ClusterSpec) -> Hosts:
    if cluster.hostfile is None:
        raise SpecError("cluster.hostfile is left out: give a hostfile with --hostfile")
    try:
        text = cluster.hostfile.read_text("utf-8")
    except OSError as error:
        raise SpecError(f"the hostfile cannot be read: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise SpecError(
            f"the hostfile {cluster.hostfile} is not text: its byte {error.start} is not UTF-8. "
            "Correct the path or the file"
        ) from error
    return select(
        parse(text, str(cluster.hostfile)),
        include=cluster.include,
        exclude=cluster.exclude,
        num_nodes=cluster.num_nodes,
    )


def parse(text: str, source: str) -> Hosts:
    """Parse a hostfile: lines ``name slots=N``. Empty lines, and anything after ``#``, are ignored."""
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if content := line.partition("#")[0].strip():
            host = _host(content, f"{source}, line {number}")
            if (first := found.setdefault(host.name.lower(), host)) is not host:
                raise SpecError(
                    f"{source}, line {number}: host {host.name!r} is listed twice; write one line for it, with all its "
                    f"slots (the first has slots={len(first.slots)})"
                )
    if not found:
        raise SpecError(f"{source} lists no host: write a line 'name slots=N' for each host")
    return Hosts(tuple(found.values()))


def select(
    hosts: Hosts, *, include: str | None = None, exclude: str | None = None, num_nodes: int | None = None
) -> Hosts:
    """Return the hosts and slots that an option selects, in hostfile order, as DeepSpeed does. Give one option at most.

    ``include`` and ``exclude`` have the form ``NAME[:SLOT[,SLOT...]][@NAME...]``; a name alone means all its slots.
    """
    if include is not None:
        chosen = _named(hosts, "include", include)
        kept = [Host(host.name, chosen.get(host.name, ())) for host in hosts.all]
    elif exclude is not None:
        gone = _named(hosts, "exclude", exclude)
        kept = [Host(host.name, _without(host.slots, gone.get(host.name, ()))) for host in hosts.all]
    else:
        kept = list(hosts.all[: num_nodes or len(hosts.all)])
        if num_nodes is not None and num_nodes > len(hosts.all):
            raise SpecError(
                f"cluster.num_nodes is {num_nodes}, but the hostfile has {quantity(len(hosts.all), 'host')}. Request "
                "fewer nodes"
            )
    selected = tuple(host for host in kept if host.slots)
    if not selected:
        raise SpecError(f"cluster.exclude is {exclude!r} and excludes every slot of every host. Exclude fewer slots")
    return Hosts(selected)


def hostfile_text(hosts: Hosts) -> str:
    """Return a hostfile for DeepSpeed with only these hosts, each with enough slots to contain the chosen ones."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts.all)


def include_argument(hosts: Hosts) -> str:
    """Return the value of DeepSpeed's ``--include`` that chooses exactly these slots from ``hostfile_text``."""
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts.all)


def _host(content: str, where: str) -> Host:
    match = _LINE.fullmatch(content)
    if match is None:
        raise SpecError(f"{where}: {content!r} is not of the form 'name slots=N'. Write the host in this form")
    name, slots = match[1], int(match[2])
    _require_name(name, where)
    if not 1 <= slots <= MAX_SLOTS:
        raise SpecError(
            f"{where}: {name} has slots={slots}; slots must be 1 to {MAX_SLOTS}. Remove the line to leave the host out"
        )
    return Host(name, tuple(range(slots)))


def _require_name(name: str, where: str) -> None:
    if ":" in name:
        raise SpecError(
            f"{where}: {name!r} has colons, which DeepSpeed and pdsh interpret differently. For an IPv6 address, "
            "define a name in /etc/hosts or in ssh's configuration, and write that name here"
        )
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{where}: {name!r} is not a plain host name (letters and digits, with '.-_' in between). "
            "Write one host per line; set users and ports with cluster.ssh_user and cluster.ssh_port"
        )
    if re.fullmatch("[0-9.]+", name):
        try:
            ipaddress.IPv4Address(name)
        except ValueError as error:
            raise SpecError(f"{where}: {name!r} is not an IPv4 address ({error}). Correct it") from None


def _named(hosts: Hosts, setting: str, text: str) -> dict[str, tuple[int, ...]]:
    """The slots that ``include`` or ``exclude`` names, by host, in ascending order."""
    known = {host.name: host for host in hosts.all}
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        name, colon, listed = part.partition(":")
        if name not in known:
            raise SpecError(
                f"cluster.{setting} is {text!r}: {name!r} is not in the hostfile ({_some(known)}). The form is "
                "NAME[:SLOT,SLOT][@NAME]"
            )
        slots = _slots(listed, known[name], f"cluster.{setting} is {text!r}") if colon else known[name].slots
        found.setdefault(name, []).extend(slots)
        if len(set(found[name])) < len(found[name]):
            raise SpecError(f"cluster.{setting} is {text!r} and names a slot of {name} twice. Name each slot once")
    return {name: tuple(sorted(slots)) for name, slots in found.items()}


def _slots(listed: str, host: Host, what: str) -> list[int]:
    slots = [int(each) if re.fullmatch("[0-9]{1,9}", each) else -1 for each in listed.split(",")]
    for slot, each in zip(slots, listed.split(","), strict=True):
        if slot not in host.slots:
            raise SpecError(f"{what}: {host.name} has no slot {each!r}. Choose from its slots, 0 to {host.slots[-1]}")
    return slots


def _without(slots: Iterable[int], gone: Iterable[int]) -> tuple[int, ...]:
    removed = set(gone)
    return tuple(slot for slot in slots if slot not in removed)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")
