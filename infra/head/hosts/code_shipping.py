"""Sends the head's own code to hosts, so that it need not be installed there.

Python, torch and other packages must be installed; infra.head.preflight checks that. The program that receives the code
is always the same text; the digest and the code are sent on its stdin.
"""

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.head.hosts.nodes import OWN_PYTHON, Nodes, ask, module_path
from infra.head.hosts.ssh import Ssh, Transport
from infra.node import code_receiver
from infra.node.code_bundle import own_bundle
from infra.node.code_receiver import Delivery, Held
from infra.node.node_folders import node_path
from t5train.errors import HostError
from t5train.spec import ClusterSpec, MachinesSpec

# Isolated and without site-packages: nothing that is installed there affects how the code is received.
_RECEIVE = ["-I", "-S", "-X", "utf8", "-c", Path(code_receiver.__file__).read_text("utf-8")]
COMMAND = [*OWN_PYTHON, *_RECEIVE]
_SECONDS = 60.0
_log = logging.getLogger(__name__)


def shipped_code(cluster: ClusterSpec) -> str | None:
    """Return the digest of the code to ship to hosts; None if the code is installed there."""
    return own_bundle().digest if cluster.ship_code else None


def path_to(code: str | None) -> dict[str, str]:
    """Return the environment variable with which processes other than infra.node find shipped code."""
    return {} if code is None else {"PYTHONPATH": module_path(code)}


def ship(transport: Transport, hosts: Iterable[str], python: Sequence[str] = OWN_PYTHON) -> dict[str, HostError]:
    """Send the code of this process to the hosts that lack it; returns the errors of those that still lack it.

    On all other hosts, the folder of the code (see ``module_path``) then exists and is complete. ``python`` is the
    command of Python there.
    """
    command = [*python, *_RECEIVE]
    asked = _ask(transport, hosts, b"", command)
    lacking = [host for host, held in asked.items() if held is False]
    sent = _ask(transport, lacking, own_bundle().content, command)
    return {host: found for host, found in (asked | sent).items() if isinstance(found, HostError)}


def hosts_with_code(transport: Transport, hosts: Iterable[str], consequence: str) -> list[str]:
    """Ship the code, and return the hosts that have it. Logs ``consequence`` and the error for each other host."""
    names = list(hosts)
    lacking = ship(transport, names)
    for error in lacking.values():
        _log.warning("%s: %s", consequence, error)
    return [name for name in names if name not in lacking]


@contextmanager
def reached_nodes(machines: MachinesSpec, hosts: Iterable[str]) -> Iterator[tuple[Nodes, dict[str, HostError]]]:
    """Yield those of the hosts that have the code, and the errors of those to which it could not be sent."""
    names, cluster = tuple(hosts), machines.cluster
    with tempfile.TemporaryDirectory(prefix="t5-hosts-") as folder:
        transport, code = Ssh.configured(cluster, Path(folder)), shipped_code(cluster)
        lacking = ship(transport, names) if code else {}
        reached = tuple(host for host in names if host not in lacking)
        yield Nodes(transport, reached, machines.storage.scratch, code), lacking


def _ask(transport: Transport, hosts: Iterable[str], content: bytes, command: list[str]) -> dict[str, bool | HostError]:
    delivery = Delivery(os.getuid(), str(node_path()), own_bundle().digest, content)
    answers = ask(transport, command, dict.fromkeys(hosts, delivery), Held, _SECONDS)
    return {host: each.is_held if isinstance(each, Held) else each for host, each in answers.items()}
