"""Kill publishing to a real S3 server at its requests and at any moment, while a plain boto3 reader watches.

Bytes that are sent twice are counted by a proxy in front of the server.
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t5train.records.stage_records import Export
from tests.support.certified_exports import PART_BYTES
from tests.support.faulty_proxy import FaultyProxy
from tests.support.s3_reader import Reader, watched
from tests.t5train.release.conftest import IN_PARTS

pytestmark = pytest.mark.slow

MANY_PARTS = {"config.json": 700, "model.safetensors": 100 << 20}
THREADS = 8
PublishAndKill = Callable[[str, float, str], int]


@pytest.fixture
def publish_and_kill(
    make_random_export: Callable[..., Export], proxy: FaultyProxy, request: pytest.FixtureRequest
) -> Iterator[PublishAndKill]:
    """Publishes to a URL in a child that is killed before or after a request, or at a moment; returns the exit code."""
    exported = make_random_export(sizes=getattr(request, "param", IN_PARTS))
    command = [sys.executable, "-m", "tests.support.killed_uploads", str(exported.path), str(PART_BYTES)]
    settings: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **settings) as process:

        def run(url: str, moment: float, when: str) -> int:
            process.stdin.write(f"{url} {moment} {when}\n")
            return int(process.stdout.readline())

        yield run


@pytest.mark.parametrize("publish_and_kill", [MANY_PARTS], indirect=True, ids=["many-parts"])
def test_an_upload_that_is_killed_again_and_again_continues_and_sends_at_most_one_part_per_thread_and_kill_twice(
    publish_and_kill: PublishAndKill, proxy: FaultyProxy, reader: Reader, destination: str, tmp_path: Path
) -> None:
    kills = 0
    with watched(reader, destination) as faults:
        while publish_and_kill(destination, 18, ("before", "after")[kills % 2]) == -signal.SIGKILL:
            kills += 1
            assert kills < 20
    assert not faults
    assert kills > 1
    manifest = reader.require_only(destination)
    total = sum(digest["size"] for digest in manifest["files"].values())
    assert total <= proxy.arrived_bytes(destination) <= total + kills * THREADS * PART_BYTES
    assert not list((tmp_path / "run").glob(".*")), "the journal is left"


def test_an_upload_killed_at_any_request_is_completed_by_the_next_and_readers_see_all_or_nothing(
    publish_and_kill: PublishAndKill, reader: Reader, destination: str, rounds: int, tmp_path: Path
) -> None:
    is_long = rounds > 1
    for number in range(0, 1000, 1 if is_long else 5):
        for when in ("before", "after") if is_long else (("before", "after")[number % 2],):
            url = f"{destination}-{number}-{when}"
            with watched(reader, url) as faults:
                code = publish_and_kill(url, number, when)
                assert code in (-signal.SIGKILL, 0)
                reader.require_all_or_nothing(url)
                if code:
                    assert publish_and_kill(url, 10_000, "before") == 0
            assert not faults
            reader.require_only(url)
            assert not list((tmp_path / "run").glob(".*")), "the journal is left"
        if code == 0:
            break
    assert number > 15


def test_an_upload_killed_at_any_moment_is_completed_by_the_next_and_readers_see_all_or_nothing(
    publish_and_kill: PublishAndKill, proxy: FaultyProxy, reader: Reader, destination: str, rounds: int, tmp_path: Path
) -> None:
    generator, started = random.Random(0), time.monotonic()
    assert publish_and_kill(destination, 10_000, "before") == 0
    seconds, kills, sent_twice = time.monotonic() - started, 0, []
    total = sum(digest["size"] for digest in reader.require_only(destination)["files"].values())
    assert proxy.arrived_bytes(destination) == total
    while kills < max(2, rounds):
        url = f"{destination}-{len(sent_twice)}"
        with watched(reader, url) as faults:
            started = time.monotonic()
            if publish_and_kill(url, generator.uniform(0, seconds), "at"):
                kills += 1
                reader.require_all_or_nothing(url)
                assert publish_and_kill(url, 10_000, "before") == 0
            else:
                seconds = min(seconds, time.monotonic() - started)  # the machine is less busy than it was
        assert not faults
        reader.require_only(url)
        sent_twice.append(proxy.arrived_bytes(url) - total)
        assert 0 <= sent_twice[-1] <= THREADS * PART_BYTES
        assert not list((tmp_path / "run").glob(".*")), "the journal is left"
    assert len(sent_twice) < 3 * kills, "most kills should come before the end"
