"""Certified exports that are not of a model, and destinations in an object store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from t5train.records.stage_records import Export
from tests.support.certified_exports import make_certified
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
