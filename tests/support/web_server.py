"""A web server that behaves like the Hub's file endpoints, and misbehaves on request."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

SIGNATURE = "X-Signature=secret-of-the-store"


class Request(NamedTuple):
    """A request for content; ``start`` is the first byte that was asked for."""

    path: str
    start: int
    end: int | None


class Answer(NamedTuple):
    """What goes wrong with one answer."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    cut_after: int | None = None
    """Close the connection after so many bytes of content."""
    flips_a_bit: bool = False


GOOD = Answer()


@dataclass
class Web:
    """Files by path, and what goes wrong with them."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    has_ranges: bool = True
    redirects: bool = False
    sends_size: bool = True
    reports_changes: bool = True
    """Whether answers have ETag and Last-Modified."""
    index: bool = False
    """Whether there is a page with links to the files."""
    overstates_size: bool = False
    encoding: str = ""
    """The Content-Encoding that is stated of all files."""
    changed_at: int = 0
    changes_meanwhile: bool = False
    seconds_per_answer: float = 0.0
    answer: Callable[[Request], Answer] = lambda _: GOOD
    """What goes wrong with the answer to a request for content."""
    head: Callable[[], int] = lambda: 200
    """The status of the answer to a request for headers."""
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.at_once = 0

    def receive(self, request: Request) -> None:
        """Record a request, and how many wait for an answer at once.

        It no longer counts when its answer begins: a client that has read the whole answer may send the next request
        before this thread runs again.
        """
        with self.lock:
            self.requests.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds_per_answer)
        with self.lock:
            self.at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    web: Web

    def do_HEAD(self) -> None:
        if not self._was_redirected():
            self._send_headers(self.web.head(), len(self._content()) + self.web.overstates_size)

    def do_GET(self) -> None:
        if self._was_redirected() or self._was_index():
            return
        start, end = self._range()
        request = Request(self.path.partition("?")[0].removeprefix("/store"), start, end)
        self.web.receive(request)
        with suppress(ConnectionError):  # a client may hang up
            self._send(request, self.web.answer(request))

    def _was_redirected(self) -> bool:
        if not self.web.redirects or self.path.startswith("/store/"):
            return False
        self.send_response(302)
        self.send_header("Location", f"/store{self.path}?{SIGNATURE}")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def _was_index(self) -> bool:
        if not self.web.index or self.path != "/":
            return False
        page = "".join(f'<a href="{name}">x</a>' for name in self.web.files).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return True

    def _content(self) -> bytes:
        return self.web.files.get(self.path.partition("?")[0].removeprefix("/store"), b"")

    def _range(self) -> tuple[int, int | None]:
        asked = self.headers.get("Range")
        if asked is None or not self.web.has_ranges:
            return 0, None
        start, end = asked.removeprefix("bytes=").split("-")
        return int(start), int(end) + 1

    def _send(self, request: Request, answer: Answer) -> None:
        whole = self._content()
        content = whole[request.start : request.end]
        if answer.flips_a_bit:
            content = bytes([content[0] ^ 1]) + content[1:]
        is_part = request.end is not None
        status = answer.status if answer.status != 200 or not is_part else 206
        more = {"Content-Range": f"bytes {request.start}-{request.end}/{len(whole)}"} if status == 206 else {}
        self._send_headers(status, len(content), dict(answer.headers) | more)
        if status < 300:
            self.wfile.write(content[: answer.cut_after])
            self.web.changed_at += self.web.changes_meanwhile

    def _send_headers(self, status: int, size: int, more: dict[str, str] | None = None) -> None:
        is_there = self.path.partition("?")[0].removeprefix("/store") in self.web.files
        self.send_response(status if is_there else 404)
        if self.web.reports_changes:
            self.send_header("Last-Modified", formatdate(self.web.changed_at, usegmt=True))
        if self.web.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        if self.web.has_ranges and self.web.reports_changes:
            self.send_header("ETag", f'"{sha256(self._content()).hexdigest()}-{self.web.changed_at}"')
        if self.web.encoding:
            self.send_header("Content-Encoding", self.web.encoding)
        if self.web.sends_size:
            self.send_header("Content-Length", str(size if status < 300 and is_there else 0))
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def at_loopback(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on the loopback interface. Yields the server's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """Serve files, and set ``web.url``."""
    with at_loopback(type("Handler", (_Handler,), {"web": web})) as web.url:
        yield web
