"""Runs commands on hosts and talks to them: one question to many hosts at once, or a conversation with one.

Data is sent on stdin, never in an argument. There are three kinds of errors: the host cannot be reached
(HostUnreachable, HostTimeout), the command failed there (RemoteFailed, whose cause is the action's own error), or the
host and the head do not understand each other (ProtocolMismatch).
"""

import io
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Self, TypeVar, cast

from infra.head.hosts import ssh
from infra.head.hosts.ssh import Transport
from infra.node import private_code
from infra.node.attempts.log_tail import printable
from infra.node.attempts.run_ownership import NodeStore
from infra.node.channel import BrokenOff, Channel, WrongMessage
from infra.node.messages import Failure, NotAMessage, Query, Request, decode
from infra.node.node_folders import code_folder
from t5train.errors import (
    BadMessage,
    HostError,
    HostTimeout,
    HostUnreachable,
    ProtocolMismatch,
    RemoteFailed,
    error_of,
)
from t5train.files.os_errors import in_one_line

A = TypeVar("A")
T = TypeVar("T")
_FAN_OUT = 64
_TRIES = 5
_RETRY_SECONDS = (0.2, 1.0)
"""Between tries; drawn at random, so that connections that were dropped together do not come together again."""
_KILL_AFTER_SECONDS = 2
_MOST_ANSWER_BYTES = 1 << 30  # far more than the packed logs of a host with many ranks, the longest answer
_MOST_STDERR_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.25
_OWN = Path(__file__).resolve().parents[3]
_CHECK = Path(private_code.__file__).read_text("utf-8")
OWN_PYTHON = (sys.executable,)
"""The command of Python on hosts where it is at the same path as here."""
END_SECONDS = 5.0
"""How long to wait for the exit code of a command whose connection has ended."""


class Connections:
    """Connections to hosts that can be ended together, from another thread."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ended = threading.Event()

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Include the local process of a connection."""
        self._processes.append(process)
        if self.ended.is_set():
            ssh.kill(process)

    def end(self) -> None:
        """Kill the local processes. That ends what waits for a host, also a write that the host blocks."""
        self.ended.set()
        for process in self._processes:
            ssh.kill(process)


def everywhere(
    hosts: Iterable[str],
    task: Callable[[str, Connections], A],
    on_result: Callable[[str, A | HostError], None] = lambda _host, _result: None,
) -> dict[str, A | HostError]:
    """Do a task for all hosts at once (64 at a time); returns results and errors in the order of the hosts.

    ``on_result`` is called in the caller's thread as they arrive. If the caller is interrupted, connections of tasks
    that are still running are ended.
    """
    connections = Connections()

    def result_of(host: str) -> A | HostError:
        try:
            return task(host, connections)
        except HostError as error:
            return error

    names, results = list(hosts), dict[str, A | HostError]()
    threads = ThreadPoolExecutor(_FAN_OUT, thread_name_prefix="remote")
    try:
        begun = {threads.submit(result_of, name): name for name in names}
        for future in as_completed(begun):
            results[begun[future]] = future.result()
            on_result(begun[future], future.result())
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        connections.end()
        threads.shutdown()
    return {name: results[name] for name in names}


@contextmanager
def connection(
    transport: Transport,
    host: str,
    argv: Sequence[str],
    connections: Connections | None = None,
    deadline_seconds: float = math.inf,
) -> Iterator[Channel]:
    """Start a command on a host, and yield a channel to it. When the block ends, its stdin is closed.

    At the deadline, the local process is killed, and ``timeout`` ends the command on the host, even if the network is
    down. Raises the HostError with the reason if the command or the connection to it fails within the block.
    """
    is_limited, deadline = deadline_seconds < math.inf, time.monotonic() + deadline_seconds
    limit = ["timeout", "-k", str(_KILL_AFTER_SECONDS), f"{deadline_seconds:.3f}"] if is_limited else []
    process = ssh.connect(transport, host, [*limit, *argv])
    timer = threading.Timer(deadline_seconds, ssh.kill, [process])
    stdin, stdout = (cast(io.BufferedIOBase, pipe) for pipe in (process.stdin, process.stdout))
    stderr = bytearray()
    collector = threading.Thread(target=_collect, args=(process.stderr, stderr), daemon=True)
    try:
        collector.start()
        if connections is not None:
            connections.add(process)
        if is_limited:
            timer.start()
        with stdin, stdout:
            yield Channel(stdout, stdin)
    except WrongMessage as error:
        raise _mismatch(host, error.reason) from error
    except ConnectionError as error:
        is_over, code = time.monotonic() >= deadline, _exit_code(process)
        collector.join(END_SECONDS)
        if is_over:
            raise ssh.timeout_of(host, argv, deadline_seconds, bytes(stderr)) from None
        if code:
            failed = reported(host, ssh.failure_of(host, argv, code, bytes(stderr)))
            raise failed from failed.__cause__
        raise HostUnreachable(f"{host}: {error}. Check whether the host is still running", [host]) from error
    finally:
        timer.cancel()
        ssh.kill(process)
        process.wait()
        if collector.ident is not None:
            collector.join(END_SECONDS)  # a process that a ProxyCommand has left may hold the pipe


def _collect(pipe: io.BufferedReader, stderr: bytearray) -> None:
    """Keep the end of what a command writes to standard error."""
    with pipe:
        while new := pipe.read1(_READ_BYTES):
            stderr += new
            del stderr[:-_MOST_STDERR_BYTES]


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; returns its exit code, or 0 if it had to be killed."""
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        ssh.kill(process)
        return 0


def _mismatch(host: str, error: BadMessage) -> ProtocolMismatch:
    """Return the error for a message that the host or the head did not expect."""
    if isinstance(error, NotAMessage):
        return ProtocolMismatch(
            f"{host}: {error}. Make the login shell there (~/.bashrc) print nothing when it has no terminal", [host]
        )
    return ProtocolMismatch(
        f"{host} runs another version of this package: {error}. Install the head's version there, or have it sent with "
        "--ship-code",
        [host],
    )


def reported(host: str, error: HostError) -> HostError:
    """Return the error that the action itself reported on stderr, or ``error`` if it reported none."""
    failure = _failure_in(error.stderr) if isinstance(error, RemoteFailed) else None
    if failure is None:
        return error
    cause = error_of(failure.kind, printable(failure.message))
    if isinstance(cause, BadMessage):
        return _mismatch(host, cause)
    failed = RemoteFailed(f"{host}: {cause}", [host])
    failed.__cause__ = cause
    return failed


def _failure_in(stderr: bytes) -> Failure | None:
    for line in reversed(stderr.splitlines()):
        with suppress(BadMessage):
            return decode(line, Failure)
    return None


def ask(
    transport: Transport,
    argv: Sequence[str],
    messages: Mapping[str, object],
    kind: type[A],
    deadline_seconds: float,
    on_start: Callable[[str], None] = lambda _host: None,
    on_answer: Callable[[str, A | HostError], None] = lambda _host, _answer: None,
) -> dict[str, A | HostError]:
    """Run a command on each host, send it the host's message, and return its one answer, of class ``kind``, by host.

    ``on_start`` is called in a thread for each host, just before the message is sent. ``on_answer`` is called in the
    caller's thread as answers arrive. If sshd drops a connection before the login, as it does at random when many
    arrive at once, it is made again.
    """

    def one(host: str, connections: Connections) -> A:
        with connection(transport, host, argv, connections, deadline_seconds) as channel:
            on_start(host)
            with suppress(BrokenPipeError):  # what it says nevertheless, or its exit code, is the better error
                channel.send(messages[host])
            channel.end_sending()
            if (answer := channel.receive(kind, _MOST_ANSWER_BYTES)) is None:
                raise BrokenOff("the command there ended without an answer")
            channel.receive(kind)  # until it has ended, and no longer uses the host's devices and memory
            return answer

    def answer_of(host: str, connections: Connections) -> A:
        for _ in range(_TRIES - 1):
            try:
                return one(host, connections)
            except HostUnreachable as error:
                if not ssh.was_dropped(error) or connections.ended.wait(random.uniform(*_RETRY_SECONDS)):
                    raise
        return one(host, connections)

    return everywhere(messages, answer_of, on_answer)


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


def node_command(action: str, code: str | None, python: Sequence[str] = OWN_PYTHON) -> list[str]:
    """Return the command that runs an action of ``infra.node`` on a node, with ``module_path(code)``.

    ``python`` is the command of Python there. Before it runs shipped code, the command checks that only this user can
    have written the folder of that code.
    """
    path = [f"PYTHONPATH={module_path(code)}"] if module_path(code) else []
    check = [] if code is None else [*python, "-I", "-S", "-c", _CHECK, str(code_folder(code))]
    return [*check, "env", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", *path, *python, "-m", "infra.node", action]


@dataclass(frozen=True)
class Nodes:
    """Hosts, and what requests to them need.

    ``scratch`` is the scratch folder (None: each host's default). ``code`` is the digest of the shipped code (None: the
    code is installed on the hosts). ``owner`` is the unique id of the run whose files the requests read and write.
    ``python`` is the command of Python on the hosts.
    """

    transport: Transport
    hosts: tuple[str, ...]
    scratch: Path | None = None
    code: str | None = None
    owner: str | None = None
    python: Sequence[str] = OWN_PYTHON

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

        For ``on_start`` and ``on_answer``, see this module's function ``ask``.
        """
        if not queries:
            return {}
        kind = type(next(iter(queries.values())))
        command = node_command(kind.action, self.code, self.python)
        return ask(self.transport, command, queries, kind.answer(), deadline_seconds, on_start, on_answer)


@contextmanager
def conversation(
    nodes: Nodes,
    host: str,
    request: Request,
    connections: Connections | None = None,
    deadline_seconds: float = math.inf,
) -> Iterator[Channel]:
    """Start an action on a host, and yield a channel to it. See ``connection``."""
    argv = node_command(request.action, nodes.code, nodes.python)
    with connection(nodes.transport, host, argv, connections, deadline_seconds) as channel:
        channel.send(request)
        yield channel


@dataclass(frozen=True)
class Attendance(Generic[T]):
    """What is expected of a process on a host: messages of class ``kind``, and how often."""

    kind: type[T]
    what: str
    """The process, in errors."""
    first_seconds: float
    """The host is lost if there is no message for so long."""
    silent_seconds: float = math.inf
    """The same, after the first message."""

    def messages(self, host: str, channel: Channel, ended: threading.Event) -> Iterator[T]:
        """Yield what arrives until the event is set. Raises BrokenOff or HostTimeout if the host is lost."""
        limit, last_at = self.first_seconds, time.monotonic()
        while not ended.is_set():
            received = channel.receive_within(_POLL_SECONDS, self.kind)
            yield from received
            if received:
                limit, last_at = self.silent_seconds, time.monotonic()
            elif channel.at_end:
                raise BrokenOff(f"{self.what} has ended")
            elif time.monotonic() - last_at > limit:
                raise HostTimeout(
                    f"{host}: nothing was received from {self.what} for {limit:g} s. Check whether the host is "
                    "reachable or overloaded, or one of its disks hangs",
                    [host],
                )


@contextmanager
def attended(
    nodes: Nodes,
    requests: Mapping[str, Request],
    attendance: Attendance[T],
    report: Callable[[str, Channel | T | HostError], None],
) -> Iterator[None]:
    """Hold a conversation with each host until the block ends, each in a thread of its own.

    ``report`` is given the channel to a host, then its messages, and the error with which the host is lost.
    """
    ended = threading.Event()

    def attend(host: str) -> None:
        try:
            with conversation(nodes, host, requests[host]) as channel:
                report(host, channel)
                for message in attendance.messages(host, channel, ended):
                    report(host, message)
        except HostError as error:
            if not ended.is_set():
                report(host, error)
        except Exception as error:  # else nobody would learn that the host is lost
            report(host, HostUnreachable(f"{host}: {in_one_line(error)}", [host]))
            raise

    threads = [threading.Thread(target=attend, args=(host,), name=host, daemon=True) for host in requests]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        ended.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
