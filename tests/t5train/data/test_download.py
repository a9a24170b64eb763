"""Downloads of text from a web server, with the failures that web servers have."""

import bz2
import gzip
import io
import json
import logging
import lzma
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
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
from tests.support.served_text import BLOCK, DURABLE, LINES, NUM_BLOCKS, serving_text
from tests.support.waiting import await_that
from tests.support.web_server import GOOD, SIGNATURE, Answer, Request, Web

pytestmark = pytest.mark.usefixtures("quick_workers")
PYTHON = sys.executable
"""The real one, for processes that are sent signals: those of quick_workers get none but SIGKILL."""

BUILD = f"""
import sys
from pathlib import Path
from t5train.data.corpus import build_corpus
from t5train.data.download import downloads, partial_file
from t5train.spec import CorpusSpec

downloads.BLOCK_BYTES, partial_file.DURABLE_BYTES = {BLOCK}, {DURABLE}
build_corpus(CorpusSpec(source=sys.argv[1], workers=1), Path(sys.argv[2]))
"""


@pytest.fixture
def web() -> Iterator[Web]:
    """A server of one text."""
    with serving_text() as web:
        yield web


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


def test_a_file_is_downloaded_in_parallel_with_progress_and_once(web: Web, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    web.seconds_per_answer = 0.02
    assert build(web, tmp_path, seen).counts["passages"] == 40_000
    assert downloaded(tmp_path).read_bytes() == LINES
    assert seen["bytes downloaded"] == (len(LINES), len(LINES))
    assert 2 < web.most_at_once <= downloads.CONNECTIONS
    assert sorted(each.start for each in content_requests(web)) == [BLOCK * number for number in range(NUM_BLOCKS)]
    web.requests.clear()
    assert build(web, tmp_path).reused
    assert web.requests == []


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


def test_a_redirected_file_is_downloaded(web: Web, tmp_path: Path) -> None:
    web.redirects = True
    assert build(web, tmp_path).counts["passages"] == 40_000


def test_an_incomplete_download_record_is_restored_by_another_download(web: Web, tmp_path: Path) -> None:
    build(web, tmp_path)
    note = downloaded(tmp_path, "text.txt.download.json")
    original = note.read_text()
    note.write_text('{"size": 1}')
    assert build(web, tmp_path).reused
    assert note.read_text() == original


def test_a_file_that_changed_without_changing_size_is_downloaded_again(web: Web, tmp_path: Path) -> None:
    first = build(web, tmp_path)
    web.files["/text.txt"] = LINES.replace(b"text", b"test")
    assert build(web, tmp_path).fingerprint != first.fingerprint


def busy_sometimes() -> Callable[[Request], Answer]:
    number = count()
    return lambda _: Answer(503) if next(number) % 3 else GOOD


def cut_sometimes() -> Callable[[Request], Answer]:
    number = count()
    return lambda request: Answer(cut_after=1000) if request.end and next(number) % 2 else GOOD


@pytest.mark.parametrize("failing", [busy_sometimes, cut_sometimes])
def test_a_busy_server_and_lost_connections_are_tried_again(
    web: Web, tmp_path: Path, failing: Callable[[], Callable[[Request], Answer]]
) -> None:
    web.answer = failing()
    build(web, tmp_path)
    assert downloaded(tmp_path).read_bytes() == LINES


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


def test_a_server_that_is_busy_at_first_is_waited_for(web: Web, tmp_path: Path) -> None:
    statuses = iter([503, 503])
    web.head = lambda: next(statuses, 200)
    web.answer = lambda request: Answer(503) if request.end is None else GOOD
    assert build(web, tmp_path).counts["passages"] == 40_000


def test_a_server_that_stays_busy_is_no_missing_file(web: Web, tmp_path: Path) -> None:
    web.head = lambda: 503
    web.answer = lambda _: Answer(503)
    with pytest.raises(InputError, match=r"text\.txt' cannot be read: the server answered with status 503"):
        build(web, tmp_path)


def test_a_transfer_that_fails_too_often_continues_where_it_ended(web: Web, tmp_path: Path) -> None:
    middle = NUM_BLOCKS // 2 * BLOCK
    web.answer = lambda request: Answer(503) if request.start >= middle and request.end != len(LINES) else GOOD
    with pytest.raises(InputError, match=r"status 503, at each of 8 tries\. Start again later: what has arrived is ke"):
        build(web, tmp_path)
    web.answer = lambda _: GOOD
    web.requests.clear()
    build(web, tmp_path)
    assert min(each.start for each in content_requests(web)) == middle
    assert downloaded(tmp_path).read_bytes() == LINES


def test_a_file_that_changes_before_a_download_continues_is_downloaded_from_the_beginning(
    web: Web, tmp_path: Path
) -> None:
    web.answer = lambda request: Answer(500) if request.start > len(LINES) // 2 and request.end != len(LINES) else GOOD
    with pytest.raises(InputError):
        build(web, tmp_path)
    web.answer = lambda _: GOOD
    web.files["/text.txt"] = changed = LINES.replace(b"text", b"test")
    build(web, tmp_path)
    assert downloaded(tmp_path).read_bytes() == changed


def test_a_refusal_is_not_tried_again_and_shows_no_signature(web: Web, tmp_path: Path) -> None:
    web.redirects = True
    web.answer = lambda request: Answer(403) if request.end else GOOD
    with pytest.raises(
        InputError, match=r"text\.txt cannot be downloaded: the server answered with status 403"
    ) as found:
        build(web, tmp_path)
    assert SIGNATURE not in str(found.value)
    assert len([each for each in web.requests if each.end]) == 1, "the one that tries whether parts can be asked for"


def test_a_file_that_changes_during_its_download_is_refused(web: Web, tmp_path: Path) -> None:
    web.changes_meanwhile = True
    with pytest.raises(InputError, match=r"/text\.txt was changed while it was downloaded: try again"):
        build(web, tmp_path)


def test_a_file_shorter_than_announced_is_refused(web: Web, tmp_path: Path) -> None:
    web.overstates_size, web.has_ranges = True, False
    with pytest.raises(InputError, match=rf"/text\.txt ended after {len(LINES)} of {len(LINES) + 1} bytes: try again"):
        build(web, tmp_path)


def test_a_missing_file_is_named(web: Web, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"/test\.txt"):
        build(web, tmp_path, pattern="test.txt")


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


def test_the_root_that_a_download_makes_is_private(web: Web, tmp_path: Path) -> None:
    build(web, tmp_path / "root")
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700


def test_several_files_are_each_whole_although_requests_fail(web: Web, tmp_path: Path) -> None:
    rng = random.Random(0)
    web.files = {f"/{number}.txt": rng.randbytes(rng.randrange(400_000)).hex().encode() for number in range(12)}
    web.files["/empty.txt"] = b""
    web.index = True
    number = count()
    web.answer = lambda request: Answer(503) if request.end and next(number) % 3 == 0 else GOOD
    seen: dict[str, object] = {}
    build(web, tmp_path, seen, pattern="*.txt")
    for name, content in web.files.items():
        assert downloaded(tmp_path, name.removeprefix("/")).read_bytes() == content
    assert any("of 13 files complete" in what for what in seen)


def test_an_archive_is_read_by_one_thread(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = {f"{name}.txt": rng.randbytes(2_000_000).hex().encode() for name in "xyz"}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    root = tmp_path / "root"
    build_corpus(CorpusSpec(source=f"tar://*.txt::{tmp_path}/a.tar", workers=1), root)
    for name, content in texts.items():
        assert downloaded(root, name).read_bytes() == content


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress], ids=["", "gz", "xz"])
def test_an_archive_is_read_to_its_end_or_refused(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    packed, suffix = io.BytesIO(), {gzip.compress: ".gz", lzma.compress: ".xz"}.get(compress, "")
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in "xyz":
            entry = tarfile.TarInfo(f"{name}.txt")
            entry.size = 600
            archive.addfile(entry, io.BytesIO(b"a text\n" * 100))
    whole, place = packed.getvalue(), tmp_path / f"a.tar{suffix}"
    header = 2 * (512 + 1024)
    damaged = whole[:header] + b"?" + whole[header + 1 :]
    source = f"tar://*.txt::{place}"
    for content in (damaged, whole[: header + 100], whole + whole):
        place.write_bytes(compress(content))
        with pytest.raises(InputError, match=r"\.tar archive cannot be read to its end: byte \d"):
            require_source(source)
    place.write_bytes(compress(whole[: 2 * (512 + 1024)]))
    with pytest.raises(InputError, match=r"archive ends at byte 3,072, without the block of zeros"):
        require_source(source)
    place.write_bytes(compress(whole))
    assert require_source(source).sizes == {f"{name}.txt": 600 for name in "xyz"}


@pytest.mark.parametrize("wanted", ["", "**/*.txt"])
def test_links_in_an_archive_are_no_further_texts(tmp_path: Path, wanted: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        (tmp_path / "b.txt").write_text("one\n")
        archive.add(tmp_path / "b.txt", "./deep/b.txt")
        for name, kind, target in (
            ("a.txt", tarfile.SYMTYPE, "deep/b.txt"),
            ("c.txt", tarfile.LNKTYPE, "deep/b.txt"),
            ("deep/d.txt", tarfile.SYMTYPE, "../a.txt"),
            ("e.txt", tarfile.SYMTYPE, "deep/notes.md"),
            ("f.txt", tarfile.SYMTYPE, "deep/notes.md"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
        archive.add(tmp_path / "b.txt", "deep/notes.md")
    found = require_source(f"tar://{wanted}::{tmp_path}/a.tar")
    assert [*found.sizes] == ["deep/b.txt", "e.txt"]
    assert found.left_out.copies == ["a.txt", "c.txt", "deep/d.txt", "f.txt"]


@pytest.mark.parametrize(
    ("suffix", "compress"), [("tgz", gzip.compress), ("tbz2", bz2.compress), ("txz", lzma.compress)]
)
def test_short_names_of_compressed_archives_are_known(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    packed, place = io.BytesIO(), tmp_path / f"a.{suffix}"
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty.txt"))
        entry = tarfile.TarInfo("a.txt")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"one\n"))
    place.write_bytes(compress(packed.getvalue()))
    assert require_source(f"tar://a.txt::{place}").sizes == {"a.txt": 4}
    place.write_bytes(compress(packed.getvalue())[:-9])
    with pytest.raises(InputError, match=r"cannot be decompressed: .*\. If the file is damaged, fetch or write it"):
        require_source(f"tar://a.txt::{place}")


def test_an_interruption_ends_a_download_that_waits_for_a_busy_server(web: Web, tmp_path: Path) -> None:
    web.answer = lambda request: Answer(503, (("Retry-After", "500"),)) if is_of_block(request) else GOOD
    command = [PYTHON, "-c", BUILD, f"{web.url}/text.txt", str(tmp_path)]
    with subprocess.Popen(command) as process:
        await_that(lambda: len(block_requests(web)) >= downloads.CONNECTIONS)
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


def test_a_download_that_is_killed_again_and_again_is_complete_in_the_end(web: Web, tmp_path: Path) -> None:
    rng = random.Random(0)
    for durable in (1, 2, 3):
        killed = threading.Event()
        web.answer = answering_until(
            (durable + 1) * DURABLE, killed
        )  # so that it cannot be complete before it is killed
        with subprocess.Popen([PYTHON, "-c", BUILD, f"{web.url}/text.txt", str(tmp_path)]) as process:
            await_noted_bytes(tmp_path, durable * DURABLE)
            time.sleep(rng.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
        killed.set()
    noted = noted_bytes(tmp_path)
    web.answer = lambda _: GOOD
    web.requests.clear()
    build(web, tmp_path)
    assert downloaded(tmp_path).read_bytes() == LINES
    assert min(each.start for each in content_requests(web)) == noted, "what was on disk is not fetched again"


def answering_until(limit: int, released: threading.Event) -> Callable[[Request], Answer]:
    """Hold the requests for bytes from ``limit`` on until the event."""

    def answer(request: Request) -> Answer:
        if request.start >= limit and request.start != len(LINES) - 1:
            released.wait()
        return GOOD

    return answer


def await_noted_bytes(root: Path, expected: int) -> None:
    await_that(lambda: noted_bytes(root) >= expected, seconds=120)


def noted_bytes(root: Path) -> int:
    """How many bytes of the incomplete download are known to be on disk."""
    notes = [json.loads(note.read_bytes()) for note in (root / "cache").rglob(".text.txt.part.json")]
    return notes[0]["bytes"] if notes else 0
