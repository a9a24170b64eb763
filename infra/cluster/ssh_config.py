"""The configuration under which every ssh of a run works, our own calls as well as pdsh's."""

import math
import re
from pathlib import Path

from t5train.errors import SpecError
from t5train.spec import ClusterSpec

CONNECT_SECONDS = 5
_CHECKS = 6
_STRICT = f"""\
BatchMode yes
StrictHostKeyChecking yes
UpdateHostKeys no
ConnectTimeout {CONNECT_SECONDS}
ConnectionAttempts 1
TCPKeepAlive yes
ControlMaster no
ControlPath none
ForwardAgent no
ForwardX11 no
ClearAllForwardings yes
PermitLocalCommand no
RemoteCommand none
RequestTTY no
LogLevel INFO
"""
# Read last, ssh takes the first value it finds of a setting. No variable of this machine's goes along.
_THE_USERS_OWN = """\
Include ~/.ssh/config
Include /etc/ssh/ssh_config
Host *
SendEnv -*
"""


def ssh_config(cluster: ClusterSpec) -> str:
    """Text of an ssh configuration: what must be comes first, the user's own and the system's for all else.

    A connection that carries nothing is given up after about ``cluster.lease_seconds``, when the ranks give up too.
    Raises SpecError if ``cluster.known_hosts`` is no file that ssh could be told of.
    """
    interval = max(1, math.floor(cluster.lease_seconds / _CHECKS))
    checks = math.ceil(cluster.lease_seconds / interval)
    lines = [f"ServerAliveInterval {interval}", f"ServerAliveCountMax {checks}"]
    if cluster.ssh_user is not None:
        lines.append(f"User {cluster.ssh_user}")
    if cluster.ssh_port is not None:
        lines.append(f"Port {cluster.ssh_port}")
    if cluster.known_hosts is not None:
        _require_known_hosts(cluster.known_hosts)
        lines += [f'UserKnownHostsFile "{cluster.known_hosts}"', "GlobalKnownHostsFile none"]
    return _STRICT + "".join(f"{line}\n" for line in lines) + _THE_USERS_OWN


def _require_known_hosts(path: Path) -> None:
    if not path.is_file():
        raise SpecError(f"cluster.known_hosts is {path}: there is no such file; make it with ssh-keyscan, and check it")
    if not re.fullmatch(r"[\w@+=:,./ -]+", str(path)):
        raise SpecError(f"cluster.known_hosts is {str(path)!r}: ssh would read some of it as other things; rename it")
