"""Where ranks of one machine meet: a store that only this machine reaches.

torch's own, on rank 0, listens on every interface whatever MASTER_ADDR says, and takes commands from whoever connects.
"""

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in torch's types

_OTHERS_LISTEN = "TORCHELASTIC_USE_AGENT_STORE"


def listen_on_loopback() -> "TCPStore | None":
    """Serve the store of ranks whose MASTER_ADDR is a loopback address; nothing for others, and on other ranks.

    To be called on every rank before the process group is made; what is returned is to be kept as long as that.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if not _is_loopback(address):
        return None
    os.environ[_OTHERS_LISTEN] = "True"  # so that torch only connects, also on rank 0
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
    except ValueError:  # the name of a host
        return False
