"""What export, certification and publication start from, made without training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_models
import pytest

from t5train.records.digests import digest_files
from t5train.records.stage_records import Export
from t5train.release.certification import certify
from t5train.release.export import export

MakeTrained = Callable[..., Any]


@pytest.fixture
def make_trained(tmp_path: Path) -> MakeTrained:
    """``make_trained(version, num_files)``: see made_models."""

    def make(version: str = "v1.1", num_files: int = 1) -> made_models.Trained:
        return made_models.make_trained(tmp_path, version, num_files)

    return make


@pytest.fixture
def make_export(make_trained: MakeTrained, tmp_path: Path) -> Callable[..., Export]:
    """An export that is certified, in this process, unless it is asked not to be."""

    def make(version: str = "v1.1", *, certified: bool = True) -> Export:
        trained = make_trained(version)
        exported = export(*trained, tmp_path / "run/export")
        if not certified:
            return exported
        certify(exported.path, trained.witness)
        files = exported.files | digest_files(exported.path, ["certificate.json"])
        return exported.model_copy(update={"files": files}).commit()

    return make
