"""Publish to a real S3 server through storms of errors and dropped connections.

A plain boto3 reader watches the server itself, and a proxy in front of it counts what arrives there. With
``--kill-rounds``, faults are repeated and storms are longer.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from t5train.errors import StoreError
from t5train.records.stage_records import Export
from t5train.release.object_store import bucket
from t5train.release.publication import publish
from tests.support.certified_exports import PART_BYTES
from tests.support.faulty_proxy import Cut, Fault, FaultyProxy, LoseAnswer, Refuse, Request
from tests.support.s3_reader import Reader, watched

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_small_parts")]


@pytest.fixture
def exported(make_random_export: Callable[..., Export]) -> Export:
    return make_random_export()


def total_bytes(exported: Export) -> int:
    return sum(digest.size for digest in exported.files.values())


def storm(proxy: FaultyProxy, seconds: float, *, after_uploads: int) -> None:
    """Have the proxy refuse everything for some time, from the upload request on that comes after so many others."""
    left, ends, codes = after_uploads, float("inf"), cycle(["SlowDown", "ServiceUnavailable", "InternalError"])

    def disturb(request: Request) -> Fault | None:
        nonlocal left, ends
        left -= request.is_upload
        if left < 0 and ends == float("inf"):
            ends = time.monotonic() + seconds
        return Refuse(next(codes)) if left < 0 and time.monotonic() < ends else None

    proxy.disturb = disturb


def test_an_upload_outlasts_a_storm_of_refusals_and_says_so(
    exported: Export, proxy: FaultyProxy, reader: Reader, destination: str, rounds: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    is_long = rounds > 1
    if not is_long:
        monkeypatch.setattr(bucket, "_TRIES", 2)
    storm(proxy, 90 if is_long else 3, after_uploads=2)
    with watched(reader, destination) as faults:
        assert not publish(exported, destination).reused
    assert not faults
    reader.require_only(destination)
    assert proxy.arrived_bytes(destination) == total_bytes(exported), "what was refused is the only thing sent twice"
    assert re.search(r"retrying for up to \d+ s: .* the server is busy or failed", caplog.text)


def test_an_upload_that_gives_up_in_a_storm_is_completed_by_the_next_and_sends_only_what_is_missing(
    exported: Export, proxy: FaultyProxy, reader: Reader, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_TRIES", 1)
    monkeypatch.setattr(bucket, "INSIST_SECONDS", 1)
    storm(proxy, 1e9, after_uploads=3)
    with watched(reader, destination) as faults:
        with pytest.raises(StoreError, match=r"the server is busy or failed, also after several tries"):
            publish(exported, destination)
        proxy.disturb = lambda _: None
        assert not publish(exported, destination).reused
    assert not faults
    reader.require_only(destination)
    sent_twice = proxy.arrived_bytes(destination) - total_bytes(exported)
    assert 0 <= sent_twice < PART_BYTES, "only a small file that the server had, but could not be asked for"


def test_a_store_that_has_never_answered_is_not_waited_for(
    exported: Export, proxy: FaultyProxy, destination: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(bucket, "_TRIES", 1)
    proxy.disturb = lambda _: Refuse("SlowDown")
    with pytest.raises(StoreError, match="SlowDown"):
        publish(exported, destination)
    assert "retrying" not in caplog.text


def test_dropped_connections_and_lost_answers_change_nothing_of_what_is_published(
    exported: Export, proxy: FaultyProxy, reader: Reader, destination: str, rounds: int
) -> None:
    dropped = 0
    for seed in range(max(2, rounds // 5)):
        generator, url = random.Random(seed), f"{destination}-{seed}"
        drawing, uploads_cut = threading.Lock(), 0

        def disturb(sent: Request, generator: random.Random = generator, drawing: threading.Lock = drawing) -> Any:
            nonlocal dropped, uploads_cut
            with drawing:
                if generator.random() > 0.3:
                    return None
                dropped += 1
                uploads_cut += sent.is_upload
                return generator.choice([LoseAnswer(), Cut(generator.randrange(sent.size + 1))])

        proxy.disturb = disturb
        with watched(reader, url) as faults:
            assert not publish(exported, url).reused
        assert not faults
        reader.require_only(url)
        sent_twice = proxy.arrived_bytes(url) - total_bytes(exported)
        assert 0 <= sent_twice <= uploads_cut * PART_BYTES
    assert dropped
