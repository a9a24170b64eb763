"""A proxy in front of an S3 server that counts what arrives there, refuses requests, and drops connections."""

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 << 10
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>a test's fault</Message></Error>"


class Request(NamedTuple):
    """The head of a request."""

    method: str
    target: str
    size: int
    """Size of the body in bytes."""

    @property
    def is_upload(self) -> bool:
        """Whether it sends an object other than a manifest or a probe of the server, or a part of one."""
        path = urlsplit(self.target).path
        return self.method == "PUT" and self.size > 0 and not path.endswith(("/manifest.json", "/probe.txt"))


class Refuse(NamedTuple):
    """Answer with an error instead of forwarding the request."""

    code: str = "SlowDown"
    status: str = "503 Slow Down"


class Cut(NamedTuple):
    """Drop the connection after some bytes of the body."""

    after_bytes: int


class LoseAnswer(NamedTuple):
    """Forward the whole request, but drop the connection when the server answers."""


class CutAnswer(NamedTuple):
    """Forward the whole request, but drop the connection after some bytes of the answer, its head included."""

    after_bytes: int


Fault = Refuse | Cut | LoseAnswer | CutAnswer


class FaultyProxy:
    """Counts and faults of a proxy that is running."""

    def __init__(self, server_port: int) -> None:
        self.server_port, self.url = server_port, ""
        self.disturb: Callable[[Request], Fault | None] = lambda _: None
        """Called with each request, from any thread. Returns what should happen to it."""
        self._counting = threading.Lock()
        self._arrived = Counter[str]()

    def count(self, request: Request, size: int) -> None:
        """Count bytes of a body that the server has received."""
        if request.is_upload:
            with self._counting:
                self._arrived[urlsplit(request.target).path] += size

    def arrived_bytes(self, destination: str) -> int:
        """Bytes of objects and parts that arrived below a destination, ``s3://BUCKET/FOLDER``; see ``is_upload``."""
        prefix = destination.removeprefix("s3:/") + "/"
        with self._counting:
            return sum(size for path, size in self._arrived.items() if path.startswith(prefix))


@contextmanager
def running_proxy(server_port: int) -> Iterator[FaultyProxy]:
    """Run a proxy for the server at this port of this machine."""
    proxy = FaultyProxy(server_port)

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", server_port)) as server:
                _forward(proxy, cast("BinaryIO", self.rfile), self.connection, server)

    class Server(ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as listening:
        proxy.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown()
            thread.join()


def _forward(proxy: FaultyProxy, requests: BinaryIO, client: socket.socket, server: socket.socket) -> None:
    """Forward the requests of one connection until one of them is disturbed or a side closes it."""
    allowed = _Allowed()
    answers = threading.Thread(target=_forward_answers, args=(server, client, allowed), daemon=True)
    answers.start()
    while head := _head(requests):
        request = _parsed(head)
        fault = proxy.disturb(request)
        if isinstance(fault, Refuse):
            _refuse(fault, head, request, requests, client)
            return
        if isinstance(fault, LoseAnswer) and not request.size:
            allowed.bytes = 0
        if isinstance(fault, CutAnswer):
            allowed.bytes = fault.after_bytes
        server.sendall(head)
        left = min(request.size, fault.after_bytes) if isinstance(fault, Cut) else request.size
        while left and (chunk := requests.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            if isinstance(fault, LoseAnswer) and not left:
                allowed.bytes = 0
            server.sendall(chunk)
            proxy.count(request, len(chunk))
        if left or isinstance(fault, Cut):
            return
    _end(server)
    answers.join()


@dataclass
class _Allowed:
    """How much of the answers on a connection the client may still get; None: all."""

    bytes: int | None = None


def _forward_answers(server: socket.socket, client: socket.socket, allowed: _Allowed) -> None:
    with suppress(OSError):
        while (content := server.recv(_CHUNK_BYTES)) and allowed.bytes != 0:
            if allowed.bytes is not None:
                content = content[: allowed.bytes]
                allowed.bytes -= len(content)
            client.sendall(content)
    _end(client)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _head(requests: BinaryIO) -> bytes:
    """Return the lines up to the empty one; nothing if the client has closed the connection."""
    lines: list[bytes] = []
    while not lines or lines[-1] != b"\r\n":
        if not (line := requests.readline()):
            return b""
        lines.append(line)
    return b"".join(lines)


def _parsed(head: bytes) -> Request:
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    size = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    assert not re.search(rb"\r\ntransfer-encoding:", head, re.IGNORECASE), "bodies are expected to have a length"
    return Request(method, target, int(size[1]) if size else 0)


def _refuse(fault: Refuse, head: bytes, request: Request, requests: BinaryIO, client: socket.socket) -> None:
    # A client that sent "Expect: 100-continue" has not sent the body yet.
    if not re.search(rb"\r\nexpect: *100-continue", head, re.IGNORECASE):
        requests.read(request.size)
    content = b"" if request.method == "HEAD" else _ERROR.format(code=fault.code).encode()
    answer = f"HTTP/1.1 {fault.status}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    client.sendall(answer + content)
