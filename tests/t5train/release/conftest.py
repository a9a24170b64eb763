"""Certified exports that are not of a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from t5train.records.stage_records import Export
from tests.support.certified_exports import make_certified

IN_PARTS = {"config.json": 700, "model.safetensors": 22 << 20, "tokenizer/spiece.model": 30_000}


@pytest.fixture
def make_random_export(tmp_path: Path) -> Callable[..., Export]:
    """Makes a certified export of random bytes: a small one, with one file in five parts of 5 MiB."""

    def make(name: str = "run", seed: int = 0, sizes: dict[str, int] = IN_PARTS) -> Export:
        return make_certified(tmp_path / name / "export", sizes, seed)

    return make
