"""The nodes of a run as places where files lie, and what is asked of all of them at once."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from infra.cluster.remote import Reply, Transport, node_command, run_everywhere
from t5train.errors import HostError, RemoteFailed

Request = dict[str, Any]


@dataclass(frozen=True)
class Nodes:
    """Hosts that share no storage, the way to them, and their scratch folder (None: the default of each).

    ``code`` is the digest of what they were sent, None where it is installed there. ``owner`` is the unique id of the
    run whose files are read and written there.
    """

    transport: Transport
    hosts: tuple[str, ...]
    scratch: Path | None = None
    code: str | None = None
    owner: str | None = None

    def on(self, *hosts: str) -> Self:
        """Some of them."""
        return replace(self, hosts=hosts)

    def request(self, **facts: Any) -> Request:
        """What an action is told."""
        return {"scratch": self.scratch and str(self.scratch), "owner": self.owner, **facts}

    def ask(
        self, action: str, request_of: Callable[[str], Request], deadline_seconds: float
    ) -> Mapping[str, Request | HostError]:
        """Have all do an action; the answers by host."""
        replies = run_everywhere(
            self.transport,
            self.hosts,
            node_command(action, self.code),
            stdin_of=lambda host: line_of(request_of(host)),
            deadline_seconds=deadline_seconds,
        )
        return {host: _answer(host, reply) for host, reply in replies.items()}


def line_of(request: Request) -> bytes:
    """A request as an action reads it."""
    return json.dumps(request).encode() + b"\n"


def _answer(host: str, reply: Reply) -> Request | HostError:
    if isinstance(reply, HostError):
        return reply
    try:
        answer = json.loads(reply.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict):
        return RemoteFailed(f"{host}: its answer is of another version of this package: install the head's there")
    return answer
