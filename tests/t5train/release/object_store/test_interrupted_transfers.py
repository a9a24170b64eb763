"""What threads do after an error or an interruption, and which journals are refused."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from t5train.errors import StorageError, StoreError
from t5train.progress import silent
from t5train.records.digests import FileDigest
from t5train.release.object_store.bucket import BucketFolder, InsistentBucket
from t5train.release.object_store.transfers import ByteCount, run_jobs
from t5train.release.object_store.upload_journal import UploadJournal

DESTINATION = "http://server s3://bucket/t5"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_after_an_error_other_threads_end_in_the_middle_of_their_files(error: type[BaseException]) -> None:
    count, started, ended = ByteCount("bytes", 0, silent), threading.Barrier(3, timeout=30), []

    def long() -> None:
        started.wait()
        try:
            while True:
                count.add(1)
        finally:
            ended.append(1)

    def fail() -> None:
        started.wait()
        raise error

    with pytest.raises(error):
        run_jobs([long, long, fail], count)
    assert len(ended) == 2


def test_an_interruption_while_jobs_are_begun_ends_those_that_run() -> None:
    count, started = ByteCount("bytes", 0, silent), time.monotonic()

    def long() -> None:
        while time.monotonic() < started + 60:
            count.add(1)

    def jobs() -> Iterator[Callable[[], None]]:
        yield from (long, long)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs(), count)
    assert time.monotonic() < started + 30


def test_only_a_few_jobs_are_begun_ahead() -> None:
    begun, ended, ahead = list[int](), list[int](), list[int]()

    def end(number: int) -> None:
        time.sleep(0.01)
        ended.append(number)

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(100):
            begun.append(number)
            yield partial(end, number)

    run_jobs(jobs(), ByteCount("bytes", 0, lambda *_: ahead.append(len(begun) - len(ended))))
    assert sorted(ended) == begun == [*range(100)]
    assert max(ahead) <= 16


def test_after_an_error_other_threads_do_not_wait_for_a_busy_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket, tries = InsistentBucket("s3://models/t5"), []
    monkeypatch.setattr(BucketFolder, "call", lambda *_, **__: {})
    bucket.call("list_objects_v2")

    def busy(*_: object, **__: object) -> None:
        tries.append(1)
        raise StoreError("busy", code="SlowDown")

    monkeypatch.setattr(BucketFolder, "call", busy)
    monkeypatch.setattr("t5train.release.object_store.bucket._FIRST_PAUSE_SECONDS", 120.0)  # ample, to be interrupted
    count = ByteCount("bytes", 0, silent, bucket.stopping)

    def fail() -> None:
        while not tries:
            pass
        raise KeyboardInterrupt

    def wait() -> None:
        bucket.call("put_object", "a")

    with pytest.raises(KeyboardInterrupt):
        run_jobs([wait, fail], count)
    assert len(tries) == 1


def test_a_journal_that_is_a_link_is_refused(tmp_path: Path) -> None:
    with UploadJournal.opened(tmp_path / "export", DESTINATION) as journal:
        path = journal.path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="the journal of the upload, cannot be written"):
        UploadJournal.opened(tmp_path / "export", DESTINATION).__enter__()


def test_a_journal_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    with UploadJournal.opened(tmp_path / "export", DESTINATION) as journal:
        journal.continue_attempt("0" * 64, {})
    with open(journal.path, "a") as file:
        file.write('{"attempt": "000000000000-0000000000000000", "content": "", "files": ["../a"]}\n')
    with pytest.raises(StorageError, match=r"names '\.\./a'"):
        UploadJournal.opened(tmp_path / "export", DESTINATION).__enter__()


def test_a_line_that_a_crash_cut_off_and_lines_of_earlier_versions_do_not_end_an_attempt(tmp_path: Path) -> None:
    with UploadJournal.opened(tmp_path / "export", DESTINATION) as journal:
        first = journal.continue_attempt("0" * 64, {})
    with open(journal.path, "a") as file:
        file.write('{"file": "config.json", "part": 1, "etag": "", "crc": 0}\n{"attempt": "000000')
    with UploadJournal.opened(tmp_path / "export", DESTINATION) as journal:
        assert journal.continue_attempt("0" * 64, {}) == first
        second = journal.continue_attempt("0" * 64, {"config.json": FileDigest(size=0, sha256="0" * 64)})
    with UploadJournal.opened(tmp_path / "export", DESTINATION) as journal:
        assert [attempt.name for attempt in journal.attempts] == [first, second]
