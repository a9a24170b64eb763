"""How a node can be reached and how it reaches others, as seen from the node itself (Linux)."""

import os
import socket
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address, IPv6Network, ip_interface, ip_network
from pathlib import Path

from infra.node import ports
from infra.node.inspection.facts import Network, Question, Route

_V4, _V6 = Path("/proc/net/route"), Path("/proc/net/ipv6_route")
_UP, _REJECT = 0x1, 0x200  # RTF_UP and RTF_REJECT of linux/route.h


def network(question: Question) -> Network:
    """Names, addresses and routes of this machine, and a port for the rendezvous, if one is requested."""
    port = (question.master_port or ports.free_port()) if question.wants_port else None
    return Network(
        hostname=socket.gethostname(),
        hostname_addresses=_resolve(socket.gethostname()),
        ssh_address=_ssh_address(os.environ.get("SSH_CONNECTION", "")),
        interfaces=_interfaces(),
        routes=[*_routes_v4(), *_routes_v6()],
        master_addresses=_resolve(question.master_address) if question.master_address else [],
        port=port,
        port_is_free=port is not None and ports.is_free(port),
    )


def _ssh_address(connection: str) -> str | None:
    """The third field of ``client-address client-port server-address server-port``, which sshd sets."""
    fields = connection.split()
    return fields[2] if len(fields) == 4 else None


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return []
    return sorted({str(address[0]).partition("%")[0] for *_, address in found})


def _interfaces() -> dict[str, list[str]]:
    import psutil  # not in the standard library

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {
        name: [cidr for one in addresses if (cidr := _cidr(one.family, one.address, one.netmask))]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _cidr(family: int, address: str, netmask: str | None) -> str | None:
    if family == socket.AF_INET:
        return ip_interface(f"{address}/{netmask or 32}").with_prefixlen
    if family == socket.AF_INET6:
        bits = bin(int(IPv6Address(netmask))).count("1") if netmask else 128
        return f"{address.partition('%')[0]}/{bits}"
    return None  # a link-layer address


def _routes_v4() -> Iterator[Route]:
    """Lines of ``interface network gateway flags refs use metric mask ...``, addresses in the machine's byte order."""
    for line in _V4.read_text("ascii").splitlines()[1:] if _V4.exists() else []:
        interface, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if int(flags, 16) & _UP and not int(flags, 16) & _REJECT:
            yield Route(str(ip_network(f"{_dotted(destination)}/{_dotted(mask)}")), interface, int(metric))


def _dotted(word: str) -> str:
    return socket.inet_ntoa(int(word, 16).to_bytes(4, sys.byteorder))


def _routes_v6() -> Iterator[Route]:
    """Lines of ``network bits source bits gateway metric refs use flags interface``, all but the last in hex."""
    for line in _V6.read_text("ascii").splitlines() if _V6.exists() else []:
        destination, bits, _, _, _, metric, _, _, flags, interface = line.split()
        if int(flags, 16) & _UP and not int(flags, 16) & _REJECT:
            found = IPv6Network((int(destination, 16), int(bits, 16)))
            yield Route(str(found), interface, int(metric, 16))
