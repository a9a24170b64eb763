"""A server that answers every request to S3 with one error."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

FORM = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message><Region>eu-west-3</Region></Error>"


@contextmanager
def answering(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Iterator[str]:
    """Serve an error, and yield the server's URL."""
    content = FORM.format(code=code, message=message).encode()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
