"""Folders of T5s: exports, and folders as other projects publish them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from t5train.release.export import export
from tests.support.synthetic_models import make_trained

MakeModel = Callable[..., Path]
SETTINGS = {"corpus": {"split": [700, 200, 100], "split_seed": 3}, "shards": {"shard_tokens": 4096}}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """``make_model(version, num_files)``: an export whose settings differ from the default ones."""

    def make(version: str = "v1.1", num_files: int = 1) -> Path:
        trained = make_trained(tmp_path, version, num_files)
        witness = trained.witness / "witness.json"
        document: dict[str, Any] = json.loads(witness.read_text())
        settings = document["trained"]["settings"]
        for part, values in SETTINGS.items():
            settings[part] |= values
        settings["optimizer"]["seed"] = 5
        settings["objective"] = {"noise_density": 0.2, "mean_span_tokens": 2.0, "input_tokens": 32}
        witness.write_text(json.dumps(document))
        return export(*trained, tmp_path / "model").path

    return make


@pytest.fixture
def make_published(make_model: MakeModel, tmp_path: Path) -> MakeModel:
    """``make_published(version, vocabulary)``: as other projects publish a T5, in several files, with one vocabulary.

    ``vocabulary`` is spiece.model or tokenizer.json.
    """

    def make(version: str = "v1.1", vocabulary: str = "spiece.model") -> Path:
        ours, theirs = make_model(version), tmp_path / "theirs"
        model = AutoModelForSeq2SeqLM.from_pretrained(ours)
        model.save_pretrained(theirs, max_shard_size="20kB")
        config = json.loads((ours / "config.json").read_text())
        (theirs / "config.json").write_text(json.dumps(config | {"n_positions": 512}))
        shutil.copy(ours / vocabulary, theirs)
        return theirs

    return make


@pytest.fixture(autouse=True)
def restore_generator() -> Any:
    with torch.random.fork_rng():
        yield
