"""A server with the endpoints of the Hugging Face Hub that reading a repository's files takes, also by ``datasets``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler
from secrets import token_hex
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.web_server import at_loopback

REPOSITORY = "someone/texts"


class Hub:
    """The files of one dataset or model, by path. ``sent`` has what is sent in place of a file's content."""

    def __init__(self, files: dict[str, bytes], repository: str = REPOSITORY, kind: str = "datasets") -> None:
        self.repository, self.kind = repository, kind
        self.token: str | None = None
        """What a private repository is shown for."""
        self.main = token_hex(20)
        """The commit that the branch main is at. No two hubs have the same, as clients keep files by their commit."""
        self.commits = {self.main: files}
        self.sent = dict[str, bytes]()
        self.is_gated = False
        self.status: Callable[[str], int] = lambda _: 206
        """The status of the answer to a request for a part of a file."""
        self.is_busy: Callable[[str], bool] = lambda _: False
        """Whether a request, by its path, is refused with status 503."""
        self.downloads: list[str] = []
        """The files of which parts were sent."""
        self.requests: list[str] = []
        self.bytes_sent = 0
        self.url = ""

    @property
    def files(self) -> dict[str, bytes]:
        """Those of main."""
        return self.commits[self.main]

    def commit(self, files: dict[str, bytes]) -> None:
        """Move main to a new commit with other files."""
        self.main = sha1(repr(sorted(files)).encode() + self.main.encode(), usedforsecurity=False).hexdigest()
        self.commits[self.main] = files

    def commit_of(self, revision: str) -> str | None:
        commit = {"main": self.main}.get(revision, revision)
        return commit if commit in self.commits else None


class _Handler(BaseHTTPRequestHandler):
    site: "HubSite"

    @property
    def hub(self) -> Hub:
        return self.site.hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        api, folder = f"/api/{self.hub.kind}/{self.hub.repository}", {"models": ""}.get(self.hub.kind, "/datasets")
        files = f"{folder}/{self.hub.repository}/resolve/"
        if self.hub.token and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            self._refuse(401, "RepoNotFound")
        elif self.hub.is_busy(path):
            self._refuse(503, "Busy")
        elif path.startswith(files):
            self._send_file(*path.removeprefix(files).split("/", 1))
        elif path == api or path.startswith(f"{api}/"):
            action, _, rest = path.removeprefix(api).strip("/").partition("/")
            self._send_facts(action, *(rest or "main").split("/", 1))
        else:
            self._refuse(401, "RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        files = self.hub.commits[str(self.hub.commit_of(self.path.rpartition("/")[2]))]
        self._send_json([self._entry(files, path) for path in asked if path in files])

    def _send_facts(self, action: str, revision: str, folder: str = "") -> None:
        commit = self.hub.commit_of(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
        elif action == "tree":
            is_recursive = "recursive=true" in self.path.lower()
            self._send_json(list(self._entries(self.hub.commits[commit], folder, is_recursive)))
        else:
            siblings = [{"rfilename": path} for path in self.hub.commits[commit]]
            self._send_json({"id": self.hub.repository, "sha": commit, "siblings": siblings})

    def _entries(self, files: dict[str, bytes], folder: str, is_recursive: bool) -> Iterator[dict[str, Any]]:
        before = f"{folder}/" if folder else ""
        below = [path for path in files if path.startswith(before)]
        for name in {path.removeprefix(before).split("/")[0] for path in below if "/" in path.removeprefix(before)}:
            yield {"type": "directory", "path": before + name, "oid": "0" * 40}
        for path in below:
            if is_recursive or "/" not in path.removeprefix(before):
                yield self._entry(files, path)

    def _entry(self, files: dict[str, bytes], path: str) -> dict[str, Any]:
        content = files[path]
        large = {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        blob = sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
        return entry if self.hub.kind == "models" and path.endswith(".json") else entry | {"lfs": large}

    def _send_file(self, revision: str, path: str) -> None:
        commit = self.hub.commit_of(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if self.hub.is_gated:
            return self._refuse(403, "GatedRepo")
        if path not in self.hub.commits[commit]:
            return self._refuse(404, "EntryNotFound")
        content = self.hub.sent.get(path, self.hub.commits[commit][path])
        start, end = 0, len(content)
        if asked := self.headers["Range"]:
            self.hub.downloads.append(path)
            if (status := self.hub.status(path)) != 206:
                return self._refuse(status, "Busy")
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(content)) if last else len(content)
            self.hub.bytes_sent += end - start
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{sha256(content).hexdigest()}"')
        return self._send(content[start:end], "application/octet-stream")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self._send(b"{}", "application/json")

    def _send_json(self, value: object, status: int = 200) -> None:
        self.send_response(status)
        self._send(json.dumps(value).encode(), "application/json")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class HubSite:
    """One URL for several hubs, one after the other: clients read the URL on import."""

    def __init__(self) -> None:
        self.url = ""
        self.hub = Hub({})

    @contextmanager
    def serving(self, hub: Hub) -> Iterator[Hub]:
        """Serve a dataset, and set ``hub.url``."""
        self.hub, hub.url = hub, self.url
        yield hub
        self.hub = Hub({})


@contextmanager
def running_site() -> Iterator[HubSite]:
    site = HubSite()
    with at_loopback(type("Handler", (_Handler,), {"site": site})) as site.url:
        yield site


@contextmanager
def serving_hub(hub: Hub) -> Iterator[Hub]:
    """Serve a dataset at a URL of its own, and set ``hub.url``, which is the client's HF_ENDPOINT."""
    with running_site() as site, site.serving(hub):
        yield hub
