"""Facts of four simulated hosts that agree in everything. Tests change some of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.head.preflight.findings import HostReply
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.inspection.facts import Build, Devices, Facts, Folder, Network, Resources, Route, Software
from infra.node.inspection.software import PACKAGES
from infra.node.node_folders import node_path

HOSTS = ["node0", "node1", "node2", "node3"]
NONCE = "f00d"
ROOT = Path("/shared/t5")
SOFTWARE = Software(
    python="3.11.9",
    machine="x86_64",
    packages={**dict.fromkeys(PACKAGES, "1.0"), "torch": "2.13.0"},
    runtime={"cuda": "13.0"},
    code_digest="c" * 64,
    spec_digest="5" * 64,
    libgomp_error="",
)
REQUIREMENTS = LaunchRequirements(
    slots=dict.fromkeys(HOSTS, (0, 1)),
    root=ROOT,
    accelerator="cuda",
    memory_bytes=dict.fromkeys(HOSTS, 8 << 30),
    shared_memory_bytes=dict.fromkeys(HOSTS, 20 << 20),
    operators=("cpu_adam",),
)


def network(number: int) -> Network:
    """The network of host ``number``: Ethernet, and a container engine's bridge with the same address on every host."""
    return Network(
        hostname=f"node{number}",
        hostname_addresses=[f"10.0.0.{number}"],
        ssh_address=f"10.0.0.{number}",
        interfaces={"lo": ["127.0.0.1/8"], "docker0": ["172.17.0.1/16"], "eth0": [f"10.0.0.{number}/24"]},
        routes=[Route("10.0.0.0/24", "eth0", 0), Route("172.17.0.0/16", "docker0", 0)],
        master_addresses=[],
        port=29500 if number == 0 else None,
        port_is_free=number == 0,
    )


def facts(number: int) -> Facts:
    """The facts of host ``number``."""
    return Facts(
        started_at=1000.2,
        ended_at=1000.4,
        identity=f"boot{number} machine net:[1]",
        network=network(number),
        software=SOFTWARE,
        devices=Devices("cuda", 2, {"0": 1 << 20, "1": 1 << 20}, {"0": 80 << 30, "1": 80 << 30}, {}, ""),
        build=Build("/usr/bin/ninja", "/usr/bin/c++", ["cpu_adam"], [], [], []),
        resources=Resources(
            64 << 30,
            65536,
            64 << 20,
            64 << 20,
            NONCE,
            Folder(str(ROOT), "", 1 << 40),
            Folder(str(node_path()), "", 1 << 40),
        ),
    )


def reply(changes: dict[str, Callable[[Facts], Facts]] | None = None) -> dict[str, HostReply]:
    """Replies of four hosts that answered within a second. ``changes`` change the facts of some hosts."""
    answers = {host: facts(number) for number, host in enumerate(HOSTS)}
    answers |= {host: change(answers[host]) for host, change in (changes or {}).items()}
    return {host: HostReply(answer, asked_at=1000.0, answered_at=1000.6) for host, answer in answers.items()}


def with_(part: str, **changes: object) -> Callable[[Facts], Facts]:
    """Return a function that changes fields of a part of the facts, such as ``resources.root``, or of the facts."""
    first, _, rest = part.partition(".")

    def change(of: Any) -> Any:
        return replace(of, **({first: with_(rest, **changes)(getattr(of, first))} if first else changes))

    return change
