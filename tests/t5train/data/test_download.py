"""Downloads of text from a web server, with the failures that web servers have."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from t5train.data.corpus import build_corpus
from t5train.errors import InputError
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec

LINES = b"".join(b"line %d of a text that takes more than one read\n" % number for number in range(200_000))
BUILD = """
import sys
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.spec import CorpusSpec

build_corpus(CorpusSpec(source=sys.argv[1], workers=1), Path(sys.argv[2]))
"""


@dataclass
class Web:
    """One file under a URL, and what goes wrong with it."""

    url: str = ""
    content: bytes = LINES
    changed_at: int = 0
    sends_size: bool = True
    cuts_off: bool = False
    changes_meanwhile: bool = False
    overstates_size: bool = False
    stalls: bool = False


class Handler(BaseHTTPRequestHandler):
    """A server without range requests, as many are."""

    web: Web

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/text.txt" else 404)
        self.send_header("Last-Modified", formatdate(self.web.changed_at, usegmt=True))
        if self.web.sends_size:
            more = self.web.overstates_size and self.command == "HEAD"
            self.send_header("Content-Length", str(len(self.web.content) + more))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path != "/text.txt":
            return
        half = len(self.web.content) // 2
        with suppress(ConnectionError):  # a client that only checks whether the file exists hangs up
            self._send(half)

    def _send(self, half: int) -> None:
        self.wfile.write(self.web.content[:half])
        if self.web.stalls:
            self.rfile.read(1)  # until the other side hangs up
        if self.web.cuts_off or self.web.stalls:
            return
        self.wfile.write(self.web.content[half:])
        self.web.changed_at += self.web.changes_meanwhile

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def web() -> Iterator[Web]:
    Handler.web = web = Web()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        web.url = f"http://127.0.0.1:{server.server_address[1]}/text.txt"
        yield web
        server.shutdown()


def build(web: Web, root: Path, seen: dict[str, object] | None = None) -> Corpus:
    def progress(what: str, done: int, total: int | None) -> None:
        if seen is not None:
            seen[what] = (done, total)

    return build_corpus(CorpusSpec(source=web.url, workers=1), root, progress)


def test_a_file_is_downloaded_with_progress_and_once(web: Web, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    assert build(web, tmp_path, seen).counts["passages"] == 200_000
    assert seen["bytes of text.txt downloaded"] == (len(LINES), len(LINES))
    (download,) = (tmp_path / "cache").rglob("text.txt")
    written_at = download.stat().st_mtime_ns
    assert build(web, tmp_path).reused
    assert download.stat().st_mtime_ns == written_at


def test_an_incomplete_download_record_is_restored_by_another_download(web: Web, tmp_path: Path) -> None:
    build(web, tmp_path)
    (note,) = (tmp_path / "cache").rglob("text.txt.download.json")
    original = note.read_text()
    note.write_text('{"size": 1}')
    assert build(web, tmp_path).reused
    assert note.read_text() == original


def test_a_file_of_unknown_size_is_downloaded(web: Web, tmp_path: Path) -> None:
    web.sends_size = False
    assert build(web, tmp_path).counts["text_bytes"] == len(LINES) - 200_000


def test_a_file_that_changed_without_changing_size_is_downloaded_again(web: Web, tmp_path: Path) -> None:
    first = build(web, tmp_path)
    web.content = LINES.replace(b"text", b"test")
    web.changed_at += 60
    assert build(web, tmp_path).fingerprint != first.fingerprint


def test_an_interrupted_transfer_is_refused_and_the_next_one_is_complete(web: Web, tmp_path: Path) -> None:
    web.cuts_off = True
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:\d+/text\.txt"):
        build(web, tmp_path)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    web.cuts_off = False
    assert build(web, tmp_path).counts["passages"] == 200_000


def test_a_file_that_changes_during_its_download_is_refused(web: Web, tmp_path: Path) -> None:
    web.changes_meanwhile = True
    with pytest.raises(InputError, match=r"/text\.txt was changed while it was downloaded: try again"):
        build(web, tmp_path)


def test_a_file_shorter_than_announced_is_refused(web: Web, tmp_path: Path) -> None:
    web.overstates_size = True
    with pytest.raises(InputError, match=rf"/text\.txt ended after {len(LINES)} of {len(LINES) + 1} bytes: try again"):
        build(web, tmp_path)


def test_a_missing_file_is_named(web: Web, tmp_path: Path) -> None:
    web.url = web.url.replace("text.txt", "test.txt")
    with pytest.raises(InputError, match=r"/test\.txt"):
        build(web, tmp_path)


@pytest.mark.slow
def test_a_partial_download_of_a_killed_process_is_never_used(web: Web, tmp_path: Path) -> None:
    web.stalls = True
    with subprocess.Popen([sys.executable, "-c", BUILD, web.url, str(tmp_path)]) as process:
        try:
            deadline = time.monotonic() + 120
            while not any(path.is_file() and path.stat().st_size for path in (tmp_path / "cache").rglob("*")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.kill()
    web.stalls = False
    assert build(web, tmp_path).counts["passages"] == 200_000
