"""Certified exports that are not of a model, and a proxy that disturbs connections to the object store."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from t5train.records.stage_records import Export
from t5train.release import publication
from t5train.release.object_store import bucket_publication
from tests.support.certified_exports import PART_BYTES, make_certified
from tests.support.faulty_proxy import FaultyProxy, running_proxy
from tests.support.object_server import ObjectServer

IN_PARTS = {"config.json": 700, "model.safetensors": 22 << 20, "tokenizer/spiece.model": 30_000}


@pytest.fixture
def make_random_export(tmp_path: Path) -> Callable[..., Export]:
    """Makes a certified export of random bytes: a small one, with one file in five parts of 5 MiB."""

    def make(name: str = "run", seed: int = 0, sizes: dict[str, int] = IN_PARTS) -> Export:
        return make_certified(tmp_path / name / "export", sizes, seed)

    return make


@pytest.fixture
def small(make_random_export: Callable[..., Export]) -> Export:
    """A certified export of random bytes, all files in one part."""
    return make_random_export(sizes={"config.json": 700, "model.safetensors": 40_000, "tokenizer/spiece.model": 3_000})


@pytest.fixture
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends files in parts of 5 MiB."""
    send = bucket_publication.publish_to_bucket
    monkeypatch.setattr(publication, "publish_to_bucket", lambda *given: send(*given, PART_BYTES))


@pytest.fixture
def proxy(s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the object store. Clients of this process and its children use it; ``reader`` does not."""
    with running_proxy(s3.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How often to repeat a fault: once, or as often as ``--kill-rounds`` says."""
    return int(request.config.getoption("--kill-rounds"))
