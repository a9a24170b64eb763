"""A server with the endpoints of the Hugging Face Hub that reading a dataset's files takes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.web_server import at_loopback

REPOSITORY = "someone/texts"
_API = f"/api/datasets/{REPOSITORY}"


class Hub:
    """The files of one dataset, by path. ``sent`` has what is sent in place of a file's content."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.sent = files, dict[str, bytes]()
        self.downloads: list[str] = []
        self.bytes_sent = 0
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path.startswith(f"{_API}/tree/"):
            _, _, folder = path.removeprefix(f"{_API}/tree/").partition("/")
            self._send_json(list(self._entries(folder)))
        elif path.startswith(_API):
            self._send_json({"id": REPOSITORY, "sha": "a" * 40, "siblings": []})
        elif "/resolve/" in path:
            self._send_file(path.partition("/resolve/")[2].partition("/")[2])
        else:
            self._send_json({"error": "not found"}, 404)

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self._send_json([self._entry(path) for path in asked if path in self.hub.files])

    def _entries(self, folder: str) -> Iterator[dict[str, Any]]:
        before = f"{folder}/" if folder else ""
        below = [path for path in self.hub.files if path.startswith(before)]
        for name in {path.removeprefix(before).split("/")[0] for path in below if "/" in path.removeprefix(before)}:
            yield {"type": "directory", "path": before + name, "oid": "0" * 40}
        yield from (self._entry(path) for path in below if "/" not in path.removeprefix(before))

    def _entry(self, path: str) -> dict[str, Any]:
        content = self.hub.files[path]
        large = {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        blob = sha1(content, usedforsecurity=False).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": blob, "lfs": large}

    def _send_file(self, path: str) -> None:
        self.hub.downloads.append(path)
        content = self.hub.sent.get(path, self.hub.files[path])
        start, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        end = min(int(last) + 1, len(content))
        self.hub.bytes_sent += end - int(start)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self._send(content[int(start) : end], "application/octet-stream")

    def _send_json(self, value: object, status: int = 200) -> None:
        self.send_response(status)
        self._send(json.dumps(value).encode(), "application/json")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving_hub(hub: Hub) -> Iterator[Hub]:
    """Serve a dataset, and set ``hub.url``, which is the client's HF_ENDPOINT."""
    with at_loopback(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
