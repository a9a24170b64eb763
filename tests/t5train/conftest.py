"""Inputs of the stages: token shards of the built-in corpus, and exports made without training."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.records.digests import digest_files
from t5train.records.stage_records import Export, TokenizerFiles, TokenShards
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import CorpusSpec, ShardsSpec, TokenizerSpec
from t5train.spec.recipes import recipe
from tests.support import synthetic_models
from tests.support.generated_text import DataChain, write_jsonl

MakeTrained = Callable[..., Any]


@pytest.fixture
def make_trained(tmp_path: Path) -> MakeTrained:
    """``make_trained(version, num_files)``: see synthetic_models."""

    def make(version: str = "v1.1", num_files: int = 1) -> synthetic_models.Trained:
        return synthetic_models.make_trained(tmp_path, version, num_files)

    return make


@pytest.fixture(scope="session")
def made_exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """``made_exports(version, certified)`` is the folder that an export was made in, once. Tests copy it."""

    @cache
    def made(version: str, certified: bool) -> Path:
        folder = tmp_path_factory.mktemp("exports")
        trained = synthetic_models.make_trained(folder, version)
        exported = export(*trained, folder / "run/export")
        if certified:
            certify(exported.path, trained.witness, start_from=trained.spec.model.start_from)
            files = exported.files | digest_files(exported.path, ["certificate.json"])
            exported.model_copy(update={"files": files}).commit()
        return folder

    return made


@pytest.fixture
def make_export(made_exports: Callable[[str, bool], Path], tmp_path: Path) -> Callable[..., Export]:
    """Makes an export, certified unless told not to."""

    def make(version: str = "v1.1", *, certified: bool = True) -> Export:
        copytree(made_exports(version, certified), tmp_path, dirs_exist_ok=True)
        return Export.load(tmp_path / "run/export")

    return make


@pytest.fixture(scope="session")
def pydocs(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerFiles, TokenShards]:
    root = tmp_path_factory.mktemp("pydocs")
    spec = recipe("smoke").with_settings({"tokenizer.vocab_size": 500})
    corpus = build_corpus(spec.corpus, root)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root)
    return tokenizer, build_shards(spec.shards, spec.corpus, corpus, tokenizer, root)


@pytest.fixture(scope="session")
def pydocs_shards(pydocs: tuple[TokenizerFiles, TokenShards]) -> TokenShards:
    return pydocs[1]


@pytest.fixture(scope="session")
def pydocs_tokenizer(pydocs: tuple[TokenizerFiles, TokenShards]) -> TokenizerFiles:
    return pydocs[0]


@pytest.fixture
def restore_torch_threads() -> Iterator[None]:
    """Restore torch's number of threads in this process after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_chain(tmp_path_factory: pytest.TempPathFactory) -> DataChain:
    """The results of the data stages. Tests must not write into them."""
    root = tmp_path_factory.mktemp("made")
    corpus_spec = CorpusSpec(source=str(write_jsonl(root / "text.jsonl", 3000)), split=(800, 150, 50))
    corpus = build_corpus(corpus_spec, root)
    tokenizer = build_tokenizer(TokenizerSpec(vocab_size=300), corpus_spec, corpus, root)
    shards_spec = ShardsSpec(shard_tokens=50_000, workers=2)
    return DataChain(
        corpus_spec, corpus, tokenizer, shards_spec, build_shards(shards_spec, corpus_spec, corpus, tokenizer, root)
    )
