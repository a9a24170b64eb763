"""Sends the head's own code to hosts, so that it need not be installed there.

Python, torch and other packages must be installed; infra.head.preflight checks that. The program that receives the code
is always the same text; the digest and the code are sent on its stdin.
"""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from infra.head.hosts.host_answers import answer_in
from infra.head.hosts.ssh import Transport, run_everywhere
from infra.node import code_receiver
from infra.node.code_bundle import own_bundle
from infra.node.code_receiver import Delivery, Held
from infra.node.messages import encode
from infra.node.node_folders import code_folder, node_path
from t5train.errors import HostError
from t5train.spec import ClusterSpec

_OWN = Path(__file__).resolve().parents[3]


def module_path(code: str | None) -> str:
    """Return PYTHONPATH for processes on hosts; may be empty.

    It is this process's PYTHONPATH with absolute paths, because the working folder on hosts differs. If ``code`` is the
    digest of shipped code, the folder of that code comes first and the head's own copy is left out.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(Path(place).absolute()) for place in named if place]
    if code is not None:
        places = [str(code_folder(code)), *(place for place in places if Path(place).resolve() != _OWN)]
    return os.pathsep.join(places)


# Isolated and without site-packages: nothing that is installed there affects how the code is received.
_RECEIVE = ["-I", "-S", "-X", "utf8", "-c", Path(code_receiver.__file__).read_text("utf-8")]
COMMAND = [sys.executable, *_RECEIVE]
_SECONDS = 60.0
_log = logging.getLogger(__name__)


def shipped_code(cluster: ClusterSpec) -> str | None:
    """Return the digest of the code to ship to hosts; None if the code is installed there."""
    return own_bundle().digest if cluster.ship_code else None


def path_to(code: str | None) -> dict[str, str]:
    """Return the environment variable with which processes other than infra.node find shipped code."""
    return {} if code is None else {"PYTHONPATH": module_path(code)}


def ship(transport: Transport, hosts: Iterable[str], python: str | None = None) -> dict[str, HostError]:
    """Send the code of this process to the hosts that lack it; returns the errors of those that still lack it.

    On all other hosts, the folder of the code (see ``module_path``) then exists and is complete. ``python`` is the path
    of Python there (None: the same as here).
    """
    command = COMMAND if python is None else [python, *_RECEIVE]
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


def _ask(transport: Transport, hosts: Iterable[str], content: bytes, command: list[str]) -> dict[str, bool | HostError]:
    stdin = encode(Delivery(os.getuid(), str(node_path()), own_bundle().digest)) + content
    replies = run_everywhere(transport, hosts, command, stdin_of=lambda _host: stdin, deadline_seconds=_SECONDS)
    answers = {host: answer_in(reply, host, Held) for host, reply in replies.items()}
    return {host: each.is_held if isinstance(each, Held) else each for host, each in answers.items()}
