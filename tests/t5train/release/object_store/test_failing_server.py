"""Publish to a real S3 server that crashes and is started again, or whose disk is full."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from t5train.errors import StoreError
from t5train.records.stage_records import Export
from t5train.release.object_store import bucket
from t5train.release.publication import publish
from tests.support.certified_exports import PART_BYTES
from tests.support.faulty_proxy import FaultyProxy, Request, running_proxy
from tests.support.object_server import BUCKET, ObjectServer, running_server
from tests.support.s3_reader import Reader, watched
from tests.support.small_disk import require_namespaces
from tests.t5train.release.conftest import IN_PARTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_small_parts")]

THREADS = 8
DISK_BYTES, LEFT_BYTES = 400 << 20, 12 << 20


def use(server: ObjectServer, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Have this process publish to a server of the test's own. Returns a reader that does not use the proxy."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**server.environment, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    return Reader(BUCKET, server.environment)


def crash_at(server: ObjectServer, proxy: FaultyProxy, upload: int, delay_seconds: float) -> Callable[[], None]:
    """Return a function that waits for a request that uploads, kills the server a moment later, and starts it again."""
    is_due, uploads = threading.Event(), 0

    def disturb(request: Request) -> None:
        nonlocal uploads
        uploads += request.is_upload
        if uploads >= upload:
            is_due.set()

    def crash() -> None:
        assert is_due.wait(60)
        time.sleep(delay_seconds)
        server.kill()
        time.sleep(1)
        server.start()

    proxy.disturb = disturb
    return crash


def test_an_upload_outlasts_a_server_that_is_killed_and_started_again(
    make_random_export: Callable[..., Export], tmp_path: Path, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, generator = make_random_export(), random.Random(0)
    total = sum(digest.size for digest in exported.files.values())
    with running_server(tmp_path / "server") as server, running_proxy(server.port) as proxy:
        reader = use(server, proxy, monkeypatch)
        for number in range(max(1, rounds // 4)):
            url = f"{server.url}/{number}/t5"
            crash = crash_at(server, proxy, generator.randrange(1, 9), generator.uniform(0, 0.1))
            with watched(reader, url, may_fail=True) as faults, ThreadPoolExecutor() as threads:
                publishing = threads.submit(publish, exported, url)
                crash()  # in this thread, because the server ends with the one that started it
                assert not publishing.result().reused
            assert not faults
            reader.require_only(url)
            assert 0 <= proxy.arrived_bytes(url) - total <= THREADS * PART_BYTES


def test_an_upload_that_a_full_disk_of_the_server_ends_is_completed_by_the_next_after_space_was_freed(
    make_random_export: Callable[..., Export], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_namespaces()
    exported = make_random_export(sizes=IN_PARTS)
    with running_server(tmp_path / "server", DISK_BYTES) as server, running_proxy(server.port) as proxy:
        reader, url = use(server, proxy, monkeypatch), f"{server.url}/t5"
        filler = server.disk / "filler"
        used = sum(path.stat().st_blocks * 512 for path in server.disk.rglob("*") if path.is_file())
        filler.write_bytes(bytes(DISK_BYTES - used - LEFT_BYTES))
        with watched(reader, url, may_fail=True) as faults:
            with monkeypatch.context() as patched:
                patched.setattr(bucket, "_TRIES", 2)
                patched.setattr(bucket, "INSIST_SECONDS", 1)
                with pytest.raises(StoreError) as caught:
                    publish(exported, url)
            filler.unlink()
            assert not publish(exported, url).reused
        assert not faults
        reader.require_only(url)
        assert caught.value.code == "InternalError"
