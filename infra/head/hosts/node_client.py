"""Runs actions of ``python -m infra.node`` on nodes: on one or on all at once, or as a conversation."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self, cast

from infra.head.hosts import ssh
from infra.head.hosts.code_shipping import module_path
from infra.head.hosts.ssh import Reply, Transport, run_everywhere
from infra.node import private_code
from infra.node.node_folders import code_folder
from infra.node.storage.file_channel import BrokenOff, Channel, files_in
from t5train.errors import HostError, HostUnreachable, RemoteFailed

_CHECK = Path(private_code.__file__).read_text("utf-8")


def node_command(action: str, code: str | None) -> list[str]:
    """The command that runs ``infra.node`` on a node, with this Python and the ``module_path`` of that code.

    Code that was sent is used only from a folder that belongs to the user alone, which the command itself checks first.
    """
    path = [f"PYTHONPATH={module_path(code)}"] if module_path(code) else []
    check = [] if code is None else [sys.executable, "-I", "-S", "-c", _CHECK, str(code_folder(code))]
    return [*check, "env", "PYTHONSAFEPATH=1", "PYTHONUTF8=1", *path, sys.executable, "-m", "infra.node", action]


Request = dict[str, Any]


@dataclass(frozen=True)
class Nodes:
    """Hosts that share no storage, the transport to them, and their scratch folder (None: the default of each).

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

    def request(self, **facts: Any) -> Request:
        """The request for an action."""
        return {"scratch": self.scratch and str(self.scratch), "owner": self.owner, **facts}

    def ask(
        self, action: str, request_of: Callable[[str], Request], deadline_seconds: float
    ) -> Mapping[str, Request | HostError]:
        """Run an action on all hosts; returns the answers by host."""
        replies = run_everywhere(
            self.transport,
            self.hosts,
            node_command(action, self.code),
            stdin_of=lambda host: line_of(request_of(host)),
            deadline_seconds=deadline_seconds,
        )
        return {host: _answer(host, reply) for host, reply in replies.items()}


def line_of(request: Request) -> bytes:
    """A request in the form that an action reads."""
    return json.dumps(request).encode() + b"\n"


def _answer(host: str, reply: Reply) -> Request | HostError:
    if isinstance(reply, HostError):
        return reply
    try:
        answer = json.loads(reply.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict):
        return RemoteFailed(
            f"{host}: its answer comes from another version of this package. Install the head's version there"
        )
    return answer


_END_SECONDS = 10.0
_log = logging.getLogger(__name__)


@contextmanager
def conversation(nodes: Nodes, host: str, action: str, request: Request) -> Iterator[Channel]:
    """Start an action on a host, and exchange messages with it; it ends when its stdin is closed.

    If the block fails because the action or the connection to it failed, raises the HostError with the reason.
    """
    argv = node_command(action, nodes.code)
    process = ssh.connect(nodes.transport, host, argv)
    said: list[bytes] = []
    stdin, stdout, stderr = (cast(IO[bytes], pipe) for pipe in (process.stdin, process.stdout, process.stderr))
    listener = threading.Thread(target=_listen, args=(stderr, said), daemon=True)
    listener.start()
    try:
        with stdin, stdout:
            stdin.write(line_of(request))
            stdin.flush()
            yield Channel(stdout, stdin)
    except ConnectionError as error:
        remote_code = _code(process)
        listener.join()
        if remote_code:
            raise ssh.failure_of(host, argv, remote_code, b"".join(said)) from error
        raise HostUnreachable(f"{host}: {error}: check whether it is still running", [host]) from error
    finally:
        ssh.kill(process)
        process.wait()
        listener.join()


def serve(channel: Channel, host: str, source: Path, on_bytes: Callable[[int], None]) -> None:
    """Serve files of the folder ``source`` to a node until it has all; ``on_bytes`` gets counts of received bytes."""
    while (message := channel.hear()) is not None:
        if "done" in message:
            return
        if "come" in message:
            on_bytes(int(message["come"]))
        elif "alone" in message:
            _log.warning(
                "%s copies from the head, because it cannot read from the previous node: %s", host, message["alone"]
            )
        else:
            channel.answer(message, files_in(source))
    raise BrokenOff("it ended before it had received all files")


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
