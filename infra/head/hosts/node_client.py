"""Runs actions of ``python -m infra.node`` on nodes: a query on many at once, or a conversation with one.

For the kinds of errors, see infra.head.hosts.host_answers.
"""

import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Self, TypeVar, cast

from infra.head.hosts import ssh
from infra.head.hosts.code_shipping import module_path
from infra.head.hosts.host_answers import answer_in, mismatch, reported
from infra.head.hosts.ssh import Reply, Transport, run_everywhere
from infra.node import private_code
from infra.node.attempts.run_ownership import NodeStore
from infra.node.channel import Channel, WrongMessage
from infra.node.messages import Query, Request, encode
from infra.node.node_folders import code_folder
from t5train.errors import HostError, HostUnreachable

A = TypeVar("A")
_CHECK = Path(private_code.__file__).read_text("utf-8")
_END_SECONDS = 10.0


def node_command(action: str, code: str | None) -> list[str]:
    """The command that runs ``infra.node`` on a node, with this Python and the ``module_path`` of that code.

    Code that was sent is used only from a folder that belongs to the user alone, which the command itself checks first.
    """
    path = [f"PYTHONPATH={module_path(code)}"] if module_path(code) else []
    check = [] if code is None else [sys.executable, "-I", "-S", "-c", _CHECK, str(code_folder(code))]
    return [*check, "env", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", *path, sys.executable, "-m", "infra.node", action]


@dataclass(frozen=True)
class Nodes:
    """Hosts, the transport to them, and their scratch folder (None: the default of each).

    ``code`` is the digest of the code that was sent, None if it is installed there. ``owner`` is the unique id of the
    run whose files are read and written there.
    """

    transport: Transport
    hosts: tuple[str, ...]
    scratch: Path | None = None
    code: str | None = None
    owner: str | None = None

    def on(self, *hosts: str) -> Self:
        """The same, for some of the hosts."""
        return replace(self, hosts=hosts)

    @property
    def store(self) -> NodeStore:
        """What requests name as the files that they are about."""
        return NodeStore(self.scratch, self.owner)

    def ask(self, query: Query[A], deadline_seconds: float) -> dict[str, A | HostError]:
        """Ask all hosts the same; returns the answers by host."""
        return self.ask_each(dict.fromkeys(self.hosts, query), deadline_seconds)

    def ask_each(
        self,
        queries: Mapping[str, Query[A]],
        deadline_seconds: float,
        on_start: Callable[[str], None] = lambda _host: None,
        on_answer: Callable[[str, A | HostError], None] = lambda _host, _answer: None,
    ) -> dict[str, A | HostError]:
        """Ask each host a query of its own, all of one class; returns the answers by host.

        ``on_start`` is called in a thread of that host, just before the query is sent to it; ``on_answer`` is called in
        this thread as answers arrive.
        """
        if not queries:
            return {}
        kind = type(next(iter(queries.values())))
        answers: dict[str, A | HostError] = {}

        def stdin_of(host: str) -> bytes:
            on_start(host)
            return encode(queries[host])

        def on_reply(host: str, reply: Reply) -> None:
            answers[host] = answer_in(reply, host, kind.answer())
            on_answer(host, answers[host])

        command = node_command(kind.action, self.code)
        run_everywhere(
            self.transport,
            queries,
            command,
            stdin_of=stdin_of,
            deadline_seconds=deadline_seconds,
            on_reply=on_reply,
        )
        return {host: answers[host] for host in queries}


@contextmanager
def conversation(nodes: Nodes, host: str, request: Request) -> Iterator[Channel]:
    """Start an action on a host, and exchange messages with it; it ends when its stdin is closed.

    If the block fails because the action or the connection to it failed, raises the HostError with the reason.
    """
    argv = node_command(request.action, nodes.code)
    process = ssh.connect(nodes.transport, host, argv)
    said: list[bytes] = []
    stdin, stdout = (cast(io.BufferedIOBase, pipe) for pipe in (process.stdin, process.stdout))
    listener = threading.Thread(target=_listen, args=(process.stderr, said), daemon=True)
    listener.start()
    try:
        with stdin, stdout:
            channel = Channel(stdout, stdin)
            channel.send(request)
            yield channel
    except WrongMessage as error:
        raise mismatch(host, error.reason) from error
    except ConnectionError as error:
        remote_code = _code(process)
        listener.join()
        if remote_code:
            raise reported(host, ssh.failure_of(host, argv, remote_code, b"".join(said))) from error
        raise HostUnreachable(f"{host}: {error}: check whether it is still running", [host]) from error
    finally:
        ssh.kill(process)
        process.wait()
        listener.join()


def _listen(stderr: IO[bytes], said: list[bytes]) -> None:
    with stderr:
        said.extend(stderr)


def _code(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; 0 also if it had to be killed."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        ssh.kill(process)
        return 0
