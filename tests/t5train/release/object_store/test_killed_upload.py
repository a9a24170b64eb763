"""Kill publishing to a real S3 server at its requests, while a plain boto3 reader watches."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from t5train.records.stage_records import Export
from tests.support.s3_reader import Reader
from tests.t5train.release.conftest import IN_PARTS

pytestmark = pytest.mark.slow

PART_BYTES = 5 << 20  # the least that S3 accepts
MANY_PARTS = {"config.json": 700, "model.safetensors": 52 << 20}

THREADS = 4


@contextmanager
def watched(reader: Reader, destination: str) -> Iterator[list[BaseException]]:
    """Read the destination again and again, and collect what readers may never see."""
    faults: list[BaseException] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            try:
                reader.require_all_or_nothing(destination)
            except BaseException as fault:  # reported by the test
                faults.append(fault)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield faults
    finally:
        ended.set()
        watcher.join()


@pytest.fixture
def publish_and_kill(
    make_random_export: Callable[..., Export], s3: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str, int, str], int]]:
    """Publishes to a URL in a child that is killed before or after one of its requests; returns the exit code."""
    exported = make_random_export(sizes=getattr(request, "param", IN_PARTS))
    arguments = [str(exported.path), str(PART_BYTES), str(tmp_path / "sent")]
    command = [sys.executable, "-m", "tests.support.killed_uploads", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def run(url: str, request: int, when: str) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{url} {request} {when}\n")
            return int(process.stdout.readline())

        yield run


def sent_bytes(log: Path) -> int:
    """Bytes of objects and parts that were sent, the manifest left out."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return sum(int(size) for _, name, size in lines if name != "manifest.json")


@pytest.mark.parametrize("publish_and_kill", [MANY_PARTS], indirect=True, ids=["many-parts"])
def test_an_upload_that_is_killed_again_and_again_continues_and_sends_at_most_one_part_per_thread_and_kill_twice(
    publish_and_kill: Callable[[str, int, str], int], reader: Reader, destination: str, tmp_path: Path
) -> None:
    kills = 0
    with watched(reader, destination) as faults:
        while publish_and_kill(destination, 10, ("before", "after")[kills % 2]) == -signal.SIGKILL:
            kills += 1
            assert kills < 20
    assert not faults
    assert kills > 1
    manifest = reader.require_only(destination)
    total = sum(digest["size"] for digest in manifest["files"].values())
    assert total <= sent_bytes(tmp_path / "sent") <= total + kills * THREADS * PART_BYTES
    assert not list((tmp_path / "run").glob(".*")), "the journal is left"


def test_an_upload_killed_at_any_request_is_completed_by_the_next_and_readers_see_all_or_nothing(
    publish_and_kill: Callable[[str, int, str], int],
    reader: Reader,
    destination: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    every = 1 if request.config.getoption("--kill-rounds") > 1 else 5
    for number in range(0, 1000, every):
        when, url = ("before", "after")[number // every % 2], f"{destination}-{number}"
        with watched(reader, url) as faults:
            code = publish_and_kill(url, number, when)
            assert code in (-signal.SIGKILL, 0)
            if code:
                assert publish_and_kill(url, 10_000, "before") == 0
        assert not faults
        reader.require_only(url)
        assert not list((tmp_path / "run").glob(".*")), "the journal is left"
        if code == 0:
            break
    assert number > 15
