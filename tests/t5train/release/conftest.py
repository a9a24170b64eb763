"""Certified exports that are not of a model, and destinations in an object store."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from t5train.records.stage_records import Export
from tests.support.certified_exports import make_certified
from tests.support.faulty_proxy import FaultyProxy, running_proxy
from tests.support.s3_reader import Reader

IN_PARTS = {"config.json": 700, "model.safetensors": 22 << 20, "tokenizer/spiece.model": 30_000}


@pytest.fixture
def make_random_export(tmp_path: Path) -> Callable[..., Export]:
    """Makes a certified export of random bytes: a small one, with one file in five parts of 5 MiB."""

    def make(name: str = "run", seed: int = 0, sizes: dict[str, int] = IN_PARTS) -> Export:
        return make_certified(tmp_path / name / "export", sizes, seed)

    return make


@pytest.fixture(scope="session")
def reader(object_store: Any) -> Reader:
    return Reader(object_store.url.removeprefix("s3://"), object_store.environment)


@pytest.fixture
def destination(s3: Any, request: pytest.FixtureRequest) -> str:
    """A destination that only this test uses."""
    return f"{s3.url}/{request.node.originalname}-{crc32(request.node.name.encode()):08x}/t5"


@pytest.fixture
def proxy(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the object store. Clients of this process and its children use it; ``reader`` does not."""
    with running_proxy(s3.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How often to repeat a fault: once, or as often as ``--kill-rounds`` says."""
    return int(request.config.getoption("--kill-rounds"))
