"""Chooses the rendezvous of the ranks, and each host's interface to it, from the facts of the hosts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_interface,
    ip_network,
)

from infra.node.inspection.facts import Network
from t5train.errors import PreflightError

Address = IPv4Address | IPv6Address
Interface = IPv4Interface | IPv6Interface
LOOPBACK = "lo"


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous: an address of the first host, and the name of the interface over which each host reaches it."""

    address: str
    interfaces: Mapping[str, str]


def choose_rendezvous(networks: Mapping[str, Network], first: str, given: str | None = None) -> Rendezvous:
    """Choose an address of host ``first`` to which every host has a route.

    ``given`` is the address or name that the user chose. Without it, the address that the head's ssh connected to is
    preferred, then an address in the network that most hosts belong to. Loopback addresses, and addresses that several
    hosts have (bridges of container engines), are not used, because they do not identify a machine. A single host uses
    loopback. Raises PreflightError if there is no such address.
    """
    others = {name: network for name, network in networks.items() if name != first}
    if not others and given is None:
        return Rendezvous("127.0.0.1", {first: LOOPBACK})
    candidates = _given(networks[first], first, given) if given else _candidates(networks[first], others)
    for address in candidates:
        ways = {name: interface_to(network, address) for name, network in networks.items()}
        found = {name: interface for name, interface in ways.items() if interface is not None}
        if len(found) == len(networks):
            return Rendezvous(str(address), found)
    raise PreflightError(_why_none(networks, first, given))


def interface_to(network: Network, address: Address) -> str | None:
    """Return the interface that has ``address``, or else that of the longest matching route; None if there is none."""
    for name, own in _addresses(network):
        if own.ip == address:
            return name
    matching = [
        (ip_network(route.network).prefixlen, -route.metric, route.interface)
        for route in network.routes
        if route.interface != LOOPBACK and address in ip_network(route.network)
    ]
    return max(matching)[2] if matching else None


def is_of_no_use(address: Address) -> bool:
    """Whether an address, used on another host, refers to a different machine or to none."""
    return address.is_loopback or address.is_link_local or address.is_unspecified


def _candidates(first: Network, others: Mapping[str, Network]) -> list[Address]:
    """Addresses of the first host, best first."""
    elsewhere = {own.ip for network in others.values() for _, own in _addresses(network)}
    usable = [own for _, own in _addresses(first) if not is_of_no_use(own.ip) and own.ip not in elsewhere]

    def rank(own: Interface) -> tuple[bool, int, int]:
        neighbours = sum(_is_in(network, own.network) for network in others.values())
        return str(own.ip) != first.ssh_address, -neighbours, own.version

    return [own.ip for own in sorted(usable, key=rank)]


def _given(first: Network, name: str, given: str) -> list[Address]:
    own = {address.ip for _, address in _addresses(first)}
    resolved = [ip_address(text) for text in first.master_addresses]
    found = [address for address in resolved if address in own and not is_of_no_use(address)]
    if not found:
        means = ", ".join(map(str, resolved)) or "nothing"
        raise PreflightError(
            f"cluster.master_address is {given!r}, which resolves to {means} on {name}, the first host. It must be an "
            f"address of that host, and not loopback (its addresses: {_own(first)}). Change cluster.master_address, or "
            "leave it out to have an address chosen"
        )
    return found


def _is_in(network: Network, wanted: IPv4Network | IPv6Network) -> bool:
    return any(own.network == wanted for _, own in _addresses(network))


def _addresses(network: Network) -> Iterator[tuple[str, Interface]]:
    for name, texts in network.interfaces.items():
        for text in texts:
            yield name, ip_interface(text)


def _own(network: Network) -> str:
    return ", ".join(str(own.ip) for _, own in _addresses(network) if not is_of_no_use(own.ip)) or "none"


def _why_none(networks: Mapping[str, Network], first: str, given: str | None) -> str:
    of_first = [own.ip for _, own in _addresses(networks[first]) if not is_of_no_use(own.ip)]
    stranded = [
        name
        for name, network in networks.items()
        if all(interface_to(network, address) is None for address in of_first)
    ]
    who = (
        f"there is no route to any of its addresses from {', '.join(stranded[:8])}"
        if stranded
        else "none of its addresses can be reached from every host"
    )
    return (
        f"the rendezvous must be on the first host, {first} (its addresses: {_own(networks[first])}), but {who}. "
        "Put the hosts into one network"
        + ("" if given else ", or set cluster.master_address to an address of the first host that all hosts can reach")
    )


def hostnames(networks: Mapping[str, Network], interfaces: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (host, description, whether naming an interface fixes it) if a host's own name misleads collectives."""
    for host, network in networks.items():
        found = [ip_address(text) for text in network.hostname_addresses]
        if found and not any(is_of_no_use(address) for address in found):
            continue
        means = f"resolves to {', '.join(map(str, found))}" if found else "resolves to no address"
        yield host, f"its hostname {network.hostname} {means} there", host in interfaces
