"""Runs actions of ``python -m infra.node`` on nodes: a query to many nodes at once, or a conversation with one.

For the kinds of errors, see infra.head.hosts.host_answers.
"""

import io
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Self, TypeVar, cast

from infra.head.hosts import ssh
from infra.head.hosts.code_shipping import module_path, ship, shipped_code
from infra.head.hosts.host_answers import answer_in, mismatch, reported
from infra.head.hosts.ssh import Reply, Ssh, Transport, run_everywhere
from infra.node import private_code
from infra.node.attempts.run_ownership import NodeStore
from infra.node.channel import Channel, WrongMessage
from infra.node.messages import Query, Request, encode
from infra.node.node_folders import code_folder
from t5train.errors import HostError, HostUnreachable
from t5train.spec import MachinesSpec

A = TypeVar("A")
_CHECK = Path(private_code.__file__).read_text("utf-8")
END_SECONDS = 5.0
"""How long to wait for the exit code of an action whose connection has ended."""


def node_command(action: str, code: str | None, python: str | None = None) -> list[str]:
    """Return the command that runs an action of ``infra.node`` on a node, with ``module_path(code)``.

    ``python`` is the path of Python there (None: the same as here). Before it runs shipped code, the command checks
    that only this user can have written the folder of that code.
    """
    path = [f"PYTHONPATH={module_path(code)}"] if module_path(code) else []
    python = python or sys.executable
    check = [] if code is None else [python, "-I", "-S", "-c", _CHECK, str(code_folder(code))]
    return [*check, "env", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", *path, python, "-m", "infra.node", action]


@dataclass(frozen=True)
class Nodes:
    """Hosts, and what requests to them need.

    ``scratch`` is the scratch folder (None: each host's default). ``code`` is the digest of the shipped code (None: the
    code is installed on the hosts). ``owner`` is the unique id of the run whose files the requests read and write.
    ``python`` is the path of Python on the hosts (None: the same as here).
    """

    transport: Transport
    hosts: tuple[str, ...]
    scratch: Path | None = None
    code: str | None = None
    owner: str | None = None
    python: str | None = None

    def on(self, *hosts: str) -> Self:
        """Return a copy for these hosts only."""
        return replace(self, hosts=hosts)

    @property
    def store(self) -> NodeStore:
        """The scratch folder and the owner of the files, as requests name them."""
        return NodeStore(self.scratch, self.owner)

    def ask(self, query: Query[A], deadline_seconds: float) -> dict[str, A | HostError]:
        """Send the same query to all hosts; returns the answers by host."""
        return self.ask_each(dict.fromkeys(self.hosts, query), deadline_seconds)

    def ask_each(
        self,
        queries: Mapping[str, Query[A]],
        deadline_seconds: float,
        on_start: Callable[[str], None] = lambda _host: None,
        on_answer: Callable[[str, A | HostError], None] = lambda _host, _answer: None,
    ) -> dict[str, A | HostError]:
        """Send each host its own query, all of one class; returns the answers by host.

        ``on_start`` is called in a thread for each host, just before its query is sent. ``on_answer`` is called in the
        caller's thread as answers arrive.
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

        command = node_command(kind.action, self.code, self.python)
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
def conversation(
    nodes: Nodes,
    host: str,
    request: Request,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _process: None,
) -> Iterator[Channel]:
    """Start an action on a host, and yield a channel to it. The action ends when the block does, with its stdin closed.

    ``on_start`` gets the local process. To kill it ends what waits for the host, also a write that the host blocks.

    Raises the HostError with the reason if the action or the connection to it fails within the block.
    """
    argv = node_command(request.action, nodes.code, nodes.python)
    process = ssh.connect(nodes.transport, host, argv)
    stderr: list[bytes] = []
    stdin, stdout = (cast(io.BufferedIOBase, pipe) for pipe in (process.stdin, process.stdout))
    collector = threading.Thread(target=_collect, args=(process.stderr, stderr), daemon=True)
    collector.start()
    try:
        on_start(process)
        with stdin, stdout:
            channel = Channel(stdout, stdin)
            channel.send(request)
            yield channel
    except WrongMessage as error:
        raise mismatch(host, error.reason) from error
    except ConnectionError as error:
        remote_code = _code(process)
        collector.join()
        if remote_code:
            raise reported(host, ssh.failure_of(host, argv, remote_code, b"".join(stderr))) from error
        raise HostUnreachable(f"{host}: {error}. Check whether the host is still running", [host]) from error
    finally:
        ssh.kill(process)
        process.wait()
        collector.join()


@contextmanager
def attended(hosts: Iterable[str], attend: Callable[[str, threading.Event], None]) -> Iterator[None]:
    """Call ``attend`` for each host in a thread of its own. Its event is set when the block ends: then it returns."""
    ended = threading.Event()
    threads = [threading.Thread(target=attend, args=(host, ended), name=host, daemon=True) for host in hosts]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        ended.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _collect(stderr: IO[bytes], lines: list[bytes]) -> None:
    with stderr:
        lines.extend(stderr)


def _code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; returns its exit code, or 0 if it had to be killed."""
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        ssh.kill(process)
        return 0


@contextmanager
def reached_nodes(machines: MachinesSpec, hosts: Iterable[str]) -> Iterator[tuple[Nodes, dict[str, HostError]]]:
    """Yield those of the hosts that have the code, and the errors of those to which it could not be sent."""
    names, cluster = tuple(hosts), machines.cluster
    with tempfile.TemporaryDirectory(prefix="t5-hosts-") as folder:
        transport, code = Ssh.configured(cluster, Path(folder)), shipped_code(cluster)
        lacking = ship(transport, names) if code else {}
        reached = tuple(host for host in names if host not in lacking)
        yield Nodes(transport, reached, machines.storage.scratch, code), lacking
