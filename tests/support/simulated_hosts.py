"""Hosts that do not exist, behind the same transport as real ones: they answer after a while, and some are not well.

What such a host says of itself are this machine's facts with a name, an address and an identity of its own. A shell
stands for the host and the way to it, so that what is measured is the work of the head.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path

from infra.node.inspection import gather
from infra.node.inspection.facts import Facts, Question, Route
from infra.node.messages import encode

NETWORK = "10.0.0.0/16"
# The facts are told with the head's nonce and the time; a fault is what ssh says, and its exit code 255.
ANSWERS = """
sleep "$1"
nonce=$(cat "$(sed 's/.*"nonce_path": "\\([^"]*\\)".*/\\1/')")
sed "s/@NONCE@/$nonce/; s/\\"@NOW@\\"/$(date +%s.%N)/g" "$2"
"""
FAILS = 'sleep "$1"; echo "$2" >&2; exit 255'
Change = Callable[[Facts], Facts]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a host: its facts, or what ssh says of it, after some seconds."""

    change: Change = lambda facts: facts
    ssh_says: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """The way to them."""

    folder: Path
    latency_seconds: float
    faults: Mapping[str, Fault]

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - only ever asked for its facts
        """A shell that answers as the host would."""
        fault = self.faults.get(host, Fault())
        if fault.ssh_says:
            return ["sh", "-c", FAILS, "sh", str(fault.seconds or self.latency_seconds), fault.ssh_says]
        return ["sh", "-c", ANSWERS, "sh", str(self.latency_seconds), str(self.folder / host)]


def facts_of(names: Sequence[str], faults: Mapping[str, Fault]) -> dict[str, Facts]:
    """What each host says of itself, but for the time and the nonce."""
    here = gather(Question(root=Path("/"), nonce_path=Path("/"), accelerator="cpu", wants_port=True))
    found = {name: _named(here, name, number) for number, name in enumerate(names)}
    return {name: faults[name].change(facts) if name in faults else facts for name, facts in found.items()}


def write_answers(folder: Path, facts: Mapping[str, Facts]) -> None:
    """One file a host, for ``Simulated``."""
    for name, said in facts.items():
        message = json.loads(encode(said))
        message["Facts"] |= {"started_at": "@NOW@", "ended_at": "@NOW@"}
        message["Facts"]["room"] |= {"nonce": "@NONCE@", "root_error": ""}
        (folder / name).write_text(json.dumps(message), "utf-8")


def _named(here: Facts, name: str, number: int) -> Facts:
    address = str(IPv4Address("10.0.0.1") + number)
    network = replace(
        here.network,
        hostname=name,
        hostname_addresses=[address],
        ssh_address=address,
        interfaces={"lo": ["127.0.0.1/8"], "docker0": ["172.17.0.1/16"], "eth0": [f"{address}/16"]},
        routes=[Route(NETWORK, "eth0", 0), Route("172.17.0.0/16", "docker0", 0)],
    )
    return replace(here, identity=f"boot-{number}", network=network)
