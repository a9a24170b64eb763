"""Real token shards of the built-in corpus and their vocabulary, made once for all tests here; none writes there."""

from collections.abc import Iterator

import pytest
import torch

from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.tokenizer import build_tokenizer
from t5train.records.stage_records import TokenizerFiles, TokenShards
from t5train.spec.recipes import recipe


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
def own_threads() -> Iterator[None]:
    """For what sets torch's number of threads in this process: set it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
