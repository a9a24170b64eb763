"""A conversation of the head with an action that runs on a node as long as it takes."""

import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from infra.cluster import remote
from infra.cluster.remote import node_command
from infra.node_store.nodes import Nodes, Request, line_of
from infra.node_store.wire import BrokenOff, Channel, files_in
from t5train.errors import HostUnreachable

_END_SECONDS = 10.0
_log = logging.getLogger(__name__)


@contextmanager
def conversation(nodes: Nodes, host: str, action: str, request: Request) -> Iterator[Channel]:
    """Begin an action on a host, and talk with it; it ends when its stdin does.

    What breaks within the block because the action or the way to it failed becomes the HostError that tells why.
    """
    argv = node_command(action, nodes.code)
    process = remote.connect(nodes.transport, host, argv)
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
            raise remote.failure_of(host, argv, remote_code, b"".join(said)) from error
        raise HostUnreachable(f"{host}: {error}: see whether it still runs", [host]) from error
    finally:
        remote.kill(process)
        process.wait()
        listener.join()


def serve(channel: Channel, host: str, source: Path, on_bytes: Callable[[int], None]) -> None:
    """Answer a node that takes files of the folder ``source`` until it has all; told of bytes that are there."""
    while (message := channel.hear()) is not None:
        if "done" in message:
            return
        if "come" in message:
            on_bytes(int(message["come"]))
        elif "alone" in message:
            _log.warning("%s takes from the head, as the node before it cannot be read: %s", host, message["alone"])
        else:
            channel.answer(message, files_in(source))
    raise BrokenOff("it ended before it had all")


def _listen(stderr: IO[bytes], said: list[bytes]) -> None:
    with stderr:
        said.extend(stderr)


def _code(process: subprocess.Popen[bytes]) -> int:
    """By which code it ended; 0 also if it had to be ended."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        remote.kill(process)
        return 0
