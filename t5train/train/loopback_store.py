"""The rendezvous of the ranks of one machine: a store that only this machine can reach.

torch's default store, on rank 0, listens on all interfaces regardless of MASTER_ADDR, and accepts commands from anyone.
"""

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in torch's types

_OTHERS_LISTEN = "TORCHELASTIC_USE_AGENT_STORE"


def listen_on_loopback() -> "TCPStore | None":
    """Serve the store if this is rank 0 and MASTER_ADDR is a loopback address. Returns None otherwise.

    Call it on every rank before the process group is created, and keep the result as long as the process group.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if not _is_loopback(address):
        return None
    os.environ[_OTHERS_LISTEN] = "True"  # makes torch only connect, also on rank 0
    if int(os.environ.get("RANK", "0")) != 0:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as above

    port = int(os.environ["MASTER_PORT"])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)  # the store closes it
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name
        return False
