"""Downloads of text from a web server, with the failures that web servers have."""

import errno
import gzip
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from t5train.data.corpus import build_corpus
from t5train.data.download import downloads
from t5train.data.download.remote_reading import READER, Backoff
from t5train.data.sources import require_source
from t5train.errors import InputError, StorageError
from t5train.progress import Interrupted
from t5train.records.stage_records import Corpus
from t5train.spec import CorpusSpec
from tests.support.served_text import BLOCK, DURABLE, LINES, NUM_BLOCKS
from tests.support.waiting import await_that
from tests.support.web_server import GOOD, SIGNATURE, Answer, Request, Web

pytestmark = pytest.mark.usefixtures("quick_workers")
PYTHON = sys.executable
"""The real one, for processes that are sent signals: those of quick_workers get none but SIGKILL."""

BUILD = f"""
import sys
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.data.download import downloads
from t5train.spec import CorpusSpec

downloads.BLOCK_BYTES, downloads.DURABLE_BYTES = {BLOCK}, {DURABLE}
build_corpus(CorpusSpec(source=sys.argv[1], workers=1), Path(sys.argv[2]))
"""


def build(
    web: Web, root: Path, seen: dict[str, object] | None = None, pattern: str = "text.txt", revision: str = ""
) -> Corpus:
    def progress(what: str, done: int, total: int | None) -> None:
        if seen is not None:
            seen[what] = (done, total)

    spec = CorpusSpec(source=f"{web.url}/{pattern}", workers=1, revision=revision)
    return build_corpus(spec, root, progress)


def downloaded(root: Path, name: str = "text.txt") -> Path:
    (found,) = (root / "cache").rglob(name)
    return found


def is_of_block(request: Request) -> bool:
    """Whether it asks for a block: neither for the file, to see whether it exists, nor for its last byte."""
    return request.end is not None and request.start != len(LINES) - 1


def block_requests(web: Web) -> list[Request]:
    return [each for each in web.requests if is_of_block(each)]


def content_requests(web: Web) -> list[Request]:
    """The requests for blocks, without the one that tries whether parts can be asked for."""
    return [each for each in web.requests if (each.start, each.end) != (len(LINES) - 1, len(LINES))]


def test_a_file_is_downloaded_in_parallel_with_progress_and_once_until_it_changes(web: Web, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    web.seconds_per_answer = 0.02
    root = tmp_path / "root"
    first = build(web, root, seen)
    assert first.counts["passages"] == 40_000
    assert root.stat().st_mode & 0o777 == 0o700
    assert downloaded(root).read_bytes() == LINES
    assert seen["bytes downloaded"] == (len(LINES), len(LINES))
    assert 2 < web.most_at_once <= downloads.CONNECTIONS
    assert sorted(each.start for each in content_requests(web)) == [BLOCK * number for number in range(NUM_BLOCKS)]
    web.requests.clear()
    assert build(web, root).reused
    assert web.requests == []
    web.files["/text.txt"] = LINES.replace(b"text", b"test")
    assert build(web, root).fingerprint != first.fingerprint


def test_a_store_that_sends_no_parts_and_no_size_is_read_from_the_beginning(web: Web, tmp_path: Path) -> None:
    web.has_ranges = web.sends_size = False
    seen: dict[str, object] = {}
    assert build(web, tmp_path, seen).counts["text_bytes"] == len(LINES) - 40_000
    assert "bytes of text.txt downloaded" in seen


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_compressed_file_is_kept_as_it_is_stored_whatever_the_server_calls_its_encoding(
    web: Web, tmp_path: Path, *, has_ranges: bool
) -> None:
    web.files["/text.txt.gz"], web.encoding, web.has_ranges = gzip.compress(LINES), "gzip", has_ranges
    for pattern in ("text.txt.gz", "*.gz"):
        web.files["/"], web.index = b"", True
        assert build(web, tmp_path, pattern=pattern).counts["passages"] == LINES.count(b"\n")
        assert downloaded(tmp_path, "text.txt.gz").read_bytes() == web.files["/text.txt.gz"]
        shutil.rmtree(tmp_path / "cache")


def test_a_server_that_redirects_and_is_busy_at_first_is_waited_for(web: Web, tmp_path: Path) -> None:
    web.redirects, statuses = True, iter([503, 503])
    web.head = lambda: next(statuses, 200)
    web.answer = lambda request: Answer(503) if request.end is None else GOOD
    assert build(web, tmp_path).counts["passages"] == 40_000


def test_a_server_that_asks_to_wait_is_left_alone_for_so_long(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, paused, numbers = threading.Barrier(downloads.CONNECTIONS), threading.Event(), count()
    pause, ends, later = Backoff._pause, list[float](), list[float]()

    def noting(backoff: Backoff, *of_failure: Any) -> None:
        ends.append(time.monotonic() + 1)  # the server has asked for a second
        pause(backoff, *of_failure)
        paused.set()

    def answer(request: Request) -> Answer:
        """Refuse the first when all threads have asked; the others' answers come once the client knows."""
        if not is_of_block(request):
            return GOOD
        if next(numbers) >= downloads.CONNECTIONS:
            later.append(time.monotonic())
            return GOOD
        together.wait()
        if request.start == 0:
            return Answer(429, (("Retry-After", "1"),))
        paused.wait()
        return GOOD

    monkeypatch.setattr(Backoff, "_pause", noting)
    web.answer = answer
    build(web, tmp_path)
    assert len(later) == NUM_BLOCKS - downloads.CONNECTIONS + 1
    assert min(later) >= ends[0]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"head": lambda: 503, "answer": lambda _: Answer(503)}, r"text\.txt' cannot be read: .* with status 503"),
        ({"changes_meanwhile": True}, r"/text\.txt was changed while it was downloaded: try again"),
        (
            {"overstates_size": True, "has_ranges": False},
            rf"/text\.txt ended after {len(LINES)} of {len(LINES) + 1} bytes: try again",
        ),
        ({"files": {}}, r"/text\.txt"),
    ],
    ids=["stays busy", "changes", "shorter than announced", "missing"],
)
def test_a_file_that_cannot_be_downloaded_is_refused_with_the_cause(
    web: Web, tmp_path: Path, trouble: dict[str, Any], said: str
) -> None:
    for name, value in trouble.items():
        setattr(web, name, value)
    with pytest.raises(InputError, match=said):
        build(web, tmp_path)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_transfer_that_fails_too_often_continues_where_it_ended_unless_the_file_has_changed(
    web: Web, tmp_path: Path, *, is_changed: bool
) -> None:
    middle = NUM_BLOCKS // 2 * BLOCK
    web.answer = lambda request: Answer(503) if request.start >= middle and request.end != len(LINES) else GOOD
    with pytest.raises(InputError, match=r"status 503, at each of 8 tries\. Start again later: what has arrived is ke"):
        build(web, tmp_path)
    web.answer = lambda _: GOOD
    web.requests.clear()
    if is_changed:
        web.files["/text.txt"] = LINES.replace(b"text", b"test")
    build(web, tmp_path)
    assert min(each.start for each in content_requests(web)) == (0 if is_changed else middle)
    assert downloaded(tmp_path).read_bytes() == web.files["/text.txt"]


def test_a_refusal_is_not_tried_again_and_shows_no_signature(web: Web, tmp_path: Path) -> None:
    web.redirects = True
    web.answer = lambda request: Answer(403) if request.end else GOOD
    with pytest.raises(
        InputError, match=r"text\.txt cannot be downloaded: the server answered with status 403"
    ) as found:
        build(web, tmp_path)
    assert SIGNATURE not in str(found.value)
    assert len([each for each in web.requests if each.end]) == 1, "the one that tries whether parts can be asked for"


def test_wrong_bytes_are_set_aside_and_the_file_is_fetched_once_more(
    web: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(web, tmp_path)
    copy = downloaded(tmp_path)
    copy.unlink()
    wrong = iter([Answer(flips_a_bit=True)])
    web.answer = lambda request: next(wrong, GOOD) if request.start == BLOCK else GOOD
    with caplog.at_level(logging.WARNING):
        assert build(web, tmp_path).reused
    assert copy.read_bytes() == LINES
    assert copy.with_name("text.txt.bad").read_bytes() != LINES
    assert "; the copy is kept as" in caplog.text


def test_a_file_that_is_wrong_twice_is_refused(web: Web, tmp_path: Path) -> None:
    build(web, tmp_path)
    downloaded(tmp_path).unlink()
    web.answer = lambda request: Answer(flips_a_bit=request.start == BLOCK)
    with pytest.raises(InputError, match="was downloaded twice, and both times its sha256 was not"):
        build(web, tmp_path)
    assert build(web, tmp_path, revision="new").counts["passages"] == 40_000


def test_the_switch_for_the_hub_does_not_forbid_other_stores(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert build(web, tmp_path).counts["passages"] == 40_000
    assert require_source(f"{web.url}/text.txt", "", tmp_path).size_bytes == len(LINES)


def test_a_server_that_reports_no_changes_is_believed_about_sizes_and_never_continued(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.reports_changes = False
    build(web, tmp_path)
    web.files["/text.txt"] = LINES * 2
    assert build(web, tmp_path).counts["passages"] == 80_000
    web.files["/text.txt"] = LINES * 3
    web.answer = lambda request: Answer(500) if request.start > len(LINES) and request.end != len(LINES) * 3 else GOOD
    with pytest.raises(InputError):
        build(web, tmp_path)
    web.answer = lambda _: GOOD
    web.files["/text.txt"] = changed = (LINES * 3).replace(b"text", b"test")
    build(web, tmp_path)
    assert downloaded(tmp_path).read_bytes() == changed


def test_the_note_of_an_earlier_version_is_honoured(web: Web, tmp_path: Path) -> None:
    build(web, tmp_path)
    note = downloaded(tmp_path, "text.txt.download.json")
    assert json.loads(note.read_text()).keys() == {"state", "size", "sha256"}
    for other in note.parent.glob(".*"):
        other.unlink()
    web.requests.clear()
    assert build(web, tmp_path).reused
    assert web.requests == []


def test_several_files_are_each_whole_although_requests_fail(web: Web, tmp_path: Path) -> None:
    rng = random.Random(0)
    web.files = {f"/{number}.txt": rng.randbytes(rng.randrange(400_000)).hex().encode() for number in range(12)}
    web.files["/empty.txt"] = b""
    web.index = True
    troubles = cycle([Answer(503), Answer(cut_after=1000), GOOD, GOOD])
    web.answer = lambda request: next(troubles) if request.end else GOOD
    seen: dict[str, object] = {}
    build(web, tmp_path, seen, pattern="*.txt")
    for name, content in web.files.items():
        assert downloaded(tmp_path, name.removeprefix("/")).read_bytes() == content
    assert any("of 13 files complete" in what for what in seen)


def test_an_interruption_ends_a_download_that_waits_for_a_busy_server(web: Web, tmp_path: Path) -> None:
    web.answer = lambda request: Answer(503, (("Retry-After", "500"),)) if is_of_block(request) else GOOD
    command = [PYTHON, "-c", BUILD, f"{web.url}/text.txt", str(tmp_path)]
    with subprocess.Popen(command) as process:
        await_that(lambda: block_requests(web))  # the others may pause before they ask
        process.send_signal(signal.SIGINT)
        assert process.wait(250) != 0, "the server has asked to be left alone for longer"


def test_threads_that_wait_for_a_busy_server_end_with_the_download(web: Web, tmp_path: Path) -> None:
    web.answer = lambda request: Answer(503, (("Retry-After", "500"),)) if request.end else GOOD

    def cancel(*_: object) -> None:
        if any(each.end for each in web.requests):
            raise Interrupted

    with pytest.raises(InputError):  # which the source's errors are converted to
        build_corpus(CorpusSpec(source=f"{web.url}/text.txt", workers=1), tmp_path, cancel)
    await_that(lambda: all(thread.name != READER for thread in threading.enumerate()), seconds=250)


def test_too_little_disk_space_is_noticed_before_anything_is_transferred(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(LINES) - 1))
    with pytest.raises(StorageError, match="too little disk space for the download of 1 file"):
        build(web, tmp_path)
    assert content_requests(web) in ([], [Request("/text.txt", 0, None)])  # the one that looks whether it exists


def test_a_disk_that_does_not_answer_is_no_fault_of_the_network(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(downloads, "os", SimpleNamespace(fsync=fsync))
    with pytest.raises(StorageError, match=r"\.text\.txt\.part: Connection timed out"):
        build(web, tmp_path)


def test_a_download_that_is_killed_again_and_again_is_complete_in_the_end(web: Web, tmp_path: Path) -> None:
    rng = random.Random(0)
    for durable in (1, 2, 3):
        killed = threading.Event()
        web.answer = held_back_from((durable + 1) * DURABLE, killed)  # it cannot be complete before it is killed
        with subprocess.Popen([PYTHON, "-c", BUILD, f"{web.url}/text.txt", str(tmp_path)]) as process:
            await_that(lambda expected=durable * DURABLE: noted_bytes(tmp_path) >= expected, seconds=120)
            time.sleep(rng.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        killed.set()
    noted = noted_bytes(tmp_path)
    web.answer = lambda _: GOOD
    web.requests.clear()
    build(web, tmp_path)
    assert downloaded(tmp_path).read_bytes() == LINES
    assert min(each.start for each in content_requests(web)) == noted, "what was on disk is not fetched again"


def held_back_from(limit: int, released: threading.Event) -> Callable[[Request], Answer]:
    """Hold the requests for bytes from ``limit`` on until the event."""

    def answer(request: Request) -> Answer:
        if request.start >= limit and request.start != len(LINES) - 1:
            released.wait()
        return GOOD

    return answer


def noted_bytes(root: Path) -> int:
    """How many bytes of the incomplete download are known to be on disk."""
    notes = [json.loads(note.read_bytes()) for note in (root / "cache").rglob(".text.txt.part.json")]
    return notes[0]["bytes"] if notes else 0
