"""Where the ranks of several machines meet: an address and a port of the first, and the interface that leads there."""

import fcntl
import os
import socket
import struct
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from infra import ports
from t5train.errors import SpecError

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only chooses the route


def meet(request: dict[str, Any]) -> dict[str, Any]:
    """An address of this machine, the one asked for or one that others reach, and a free port, or the one asked for."""
    if request["port"] is None:
        port = ports.free_port()
    else:
        port = request["port"]
        ports.require_free(port)
    return {"address": request["address"] or own_address(), "port": port}


def own_address() -> str:
    """The address at which the head reached this machine, else of its first interface but loopback."""
    connection = os.environ.get("SSH_CONNECTION", "").split()  # of sshd: client, its port, server, its port
    found = [*connection[2:3], *addresses().values()]
    for address in found:
        if not ip_address(address).is_loopback:
            return address
    raise SpecError(
        f"host {socket.gethostname()} has no address but loopback's ({', '.join(found) or 'none'}), which no other "
        "host can reach: set cluster.master_address"
    )


def interface_of(address: str) -> str | None:
    """The interface by which this machine reaches ``address``, or that has it; None where that cannot be told."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(place)
            source = sock.getsockname()[0]
    except OSError:
        return None  # preflight tells who does not reach whom
    return next((name for name, own in addresses().items() if own == source), None)


def variables(interface: str | None) -> dict[str, str]:
    """What makes the collectives' libraries use that interface, and not the one the hostname resolves to."""
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def boot_id() -> str:
    """Another one each time this machine starts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
