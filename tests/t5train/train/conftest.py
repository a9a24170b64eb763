"""Real token shards of the built-in corpus, made once for all tests here; none of them writes into it."""

import pytest

from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.tokenizer import build_tokenizer
from t5train.recipes import recipe
from t5train.records import TokenShards


@pytest.fixture(scope="session")
def pydocs_shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    root = tmp_path_factory.mktemp("pydocs")
    spec = recipe("smoke").with_settings({"tokenizer.vocab_size": 500})
    corpus = build_corpus(spec.corpus, root)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root)
    return build_shards(spec.shards, spec.corpus, corpus, tokenizer, root)
