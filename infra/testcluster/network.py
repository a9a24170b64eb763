"""The cluster's network: a switch in its own network namespace, and a cable from the switch to every host.

The network is isolated, so several clusters can use the same addresses. A cable is named after its host.
"""

import subprocess

from infra.node.processes import ProcessIdentity

HEAD = "head"
_SUBNET = "10.77.0"
MOST_NODES = 200


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
