"""TCP ports, such as that of the rendezvous."""

import errno
import random
import socket
from dataclasses import dataclass

from t5train.errors import LaunchError, SpecError

# Below the kernel's port range for outgoing connections, so that none of them takes the port before rank 0 does.
_CANDIDATES = range(20_000, 32_000)


@dataclass(frozen=True)
class Endpoint:
    """The address and port on which a server listens."""

    address: str
    port: int


def require_free(port: int) -> None:
    """Raise SpecError if something listens on ``port`` on any address of this machine."""
    if not is_free(port):
        raise SpecError(
            f"cluster.master_port is {port}, but another program listens on that port. Choose another port, or leave "
            f"the setting out to use a free one"
        )


def free_port() -> int:
    """Return a port on which nothing listens now. Raises LaunchError if none is found in 100 tries."""
    for port in random.sample(_CANDIDATES, 100):
        if is_free(port):
            return port
    raise LaunchError(
        f"no free port among 100 tried between {_CANDIDATES.start} and {_CANDIDATES.stop}. Set cluster.master_port"
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` on every address, IPv4 and IPv6."""
    dual = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        ).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
