"""Simulated hosts behind the same transport as real ones. They answer after a delay, and some have faults.

A simulated host reports this machine's facts with its own name, address and identity. A shell stands for the host and
the connection to it, so a benchmark measures only the work of the head.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path

from infra.node.inspection import collect_facts
from infra.node.inspection.facts import Facts, Question, Route
from infra.node.messages import encode

NETWORK = "10.0.0.0/16"
# ANSWERS prints a host's facts with the head's nonce and the current time. FAILS prints what ssh would, and exits with
# ssh's exit code 255.
ANSWERS = """
sleep "$1"
nonce=$(cat "$(sed 's/.*"nonce_path": "\\([^"]*\\)".*/\\1/')")
sed "s/@NONCE@/$nonce/; s/\\"@NOW@\\"/$(date +%s.%N)/g" "$2"
"""
FAILS = 'sleep "$1"; echo "$2" >&2; exit 255'
Change = Callable[[Facts], Facts]


@dataclass(frozen=True)
class Fault:
    """A fault of a host: changed facts, or an error message of ssh after ``seconds`` (0: the usual latency)."""

    change: Change = lambda facts: facts
    ssh_error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """The transport to simulated hosts."""

    folder: Path
    latency_seconds: float
    faults: Mapping[str, Fault]

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - only ever asked for its facts
        """The command line of a shell that answers as the host would."""
        fault = self.faults.get(host, Fault())
        if fault.ssh_error:
            return ["sh", "-c", FAILS, "sh", str(fault.seconds or self.latency_seconds), fault.ssh_error]
        return ["sh", "-c", ANSWERS, "sh", str(self.latency_seconds), str(self.folder / host)]


def facts_of(names: Sequence[str], faults: Mapping[str, Fault]) -> dict[str, Facts]:
    """The facts that each host reports, except the time and the nonce."""
    here = collect_facts(Question(root=Path("/"), nonce_path=Path("/"), accelerator="cpu", wants_port=True))
    found = {name: _named(here, name, number) for number, name in enumerate(names)}
    return {name: faults[name].change(facts) if name in faults else facts for name, facts in found.items()}


def write_answers(folder: Path, facts: Mapping[str, Facts]) -> None:
    """Write one file per host, which ``Simulated`` answers with."""
    for name, host_facts in facts.items():
        message = json.loads(encode(host_facts))
        message["Facts"] |= {"started_at": "@NOW@", "ended_at": "@NOW@"}
        message["Facts"]["resources"]["nonce"] = "@NONCE@"
        message["Facts"]["resources"]["root"]["error"] = ""
        (folder / name).write_text(f"{json.dumps(message)}\n", "utf-8")


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
