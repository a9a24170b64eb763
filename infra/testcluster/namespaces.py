"""Starts processes in new namespaces, for a host or the switch, and connects hosts with the switch.

The switch is a network namespace of its own, with a cable to every host that is named after the host. The network is
isolated, so several clusters can use the same addresses. ``what_is_missing`` checks whether this machine can do it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import IO, cast

from infra.node.processes import ProcessIdentity
from infra.testcluster import registry
from t5train.errors import TestClusterError

HEAD = "head"
_SUBNET = "10.77.0"
MOST_NODES = 200
HOST = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
SWITCH = ("--net",)
_CODE = str(Path(__file__).parents[2])


def start(
    cluster: str, kinds: tuple[str, ...], argv: list[str], wanted: bytes, console: Path
) -> subprocess.Popen[bytes]:
    """Start a program that reads ``wanted`` and prints a line once it is ready. Call ``await_ready`` next."""
    state = registry.read(cluster)
    prefix = ["setpriv", "--pdeathsig", "KILL"] if state.temporary else []
    with open(console, "wb") as errors:
        process = subprocess.Popen(
            [*prefix, "unshare", *kinds, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=state.environment | registry.mark(cluster) | {"PYTHONPATH": _CODE},
            start_new_session=True,  # Ctrl-C in a terminal must not reach hosts
        )
    with cast(IO[bytes], process.stdin) as stdin:
        stdin.write(wanted)
    return process


def await_ready(process: subprocess.Popen[bytes], console: Path) -> None:
    """Wait until a program prints that line. Raises TestClusterError, with its console output, if it ends before."""
    with cast(IO[bytes], process.stdout) as output:
        if output.readline():
            return
    said = console.read_text("utf-8", "replace")[-2000:]
    raise TestClusterError(f"{console.parent.name} did not start: {said or 'it wrote nothing to its console'}")


PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
}
"""The programs that a test cluster uses, and the Debian package of each."""


def what_is_missing() -> str | None:
    """Why this machine cannot run a test cluster, with the remedy; None if it can."""
    if os.geteuid() != 0:
        return "only root can make namespaces: run this as root (sudo, or a container with --privileged)"
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    lacking = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=path)})
    if lacking:
        return f"Debian packages are missing: apt-get install {' '.join(lacking)}"
    tried = subprocess.run(["unshare", *HOST, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"cannot make namespaces ({tried.stderr.strip()}): if this is a container, start it with --privileged"
    return None


def address(host: str) -> str:
    """The host's address on the cluster's network."""
    return f"{_SUBNET}.{2 if host == HEAD else 10 + int(host.removeprefix('node'))}"


def make_switch(switch: ProcessIdentity) -> None:
    """Turn the network namespace of a process into a switch."""
    _ip(switch, "link add br0 type bridge forward_delay 0", "link set br0 up", "link set lo up")


def plug(switch: ProcessIdentity, host: str, init: ProcessIdentity) -> None:
    """Connect a host. Its hardware address never changes, so that others find it after a reboot."""
    number = int(address(host).rpartition(".")[2])
    cable = f"link add dev {host} type veth peer name eth0 address 02:00:0a:4d:00:{number:02x} netns {init.pid}"
    _ip(switch, cable, f"link set dev {host} master br0 up")
    _ip(init, "link set lo up", f"addr add {address(host)}/24 dev eth0", "link set eth0 up")


def unplug(switch: ProcessIdentity, host: str) -> None:
    """Remove a host's cable."""
    _ip(switch, f"link delete dev {host}")


def set_link(switch: ProcessIdentity, host: str, state: str) -> None:
    """Unplug a host's cable (``down``) or plug it back in (``up``)."""
    _ip(switch, f"link set dev {host} {state}")


def set_rate(switch: ProcessIdentity, host: str, init: ProcessIdentity, rate: str | None) -> None:
    """Limit both directions of a cable to ``rate`` (in tc's units, for example ``200mbit``); None removes the limit."""
    for end, device in ((switch, host), (init, "eth0")):
        limit = ["tbf", "rate", rate, "burst", "512kb", "latency", "50ms"] if rate else ["pfifo"]
        _within(end, ["tc", "qdisc", "replace", "dev", device, "root", *limit])


def _ip(end: ProcessIdentity, *commands: str) -> None:
    _within(end, ["ip", "-batch", "-"], "\n".join(commands))


def _within(end: ProcessIdentity, command: list[str], text: str = "") -> None:
    argv = ["nsenter", f"--target={end.pid}", "--net", *command]
    subprocess.run(argv, input=text, text=True, check=True, capture_output=True)
