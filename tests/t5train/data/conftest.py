"""A small corpus, vocabulary and shards that the tests of the data stages share; none of them writes into it."""

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.tokenizer import build_tokenizer
from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards
from t5train.spec import CorpusSpec, ShardsSpec, TokenizerSpec

SYLLABLES = ["ba", "cor", "dine", "el", "fru", "gis", "ha", "il", "jo", "kern", "lum", "mo", "nes", "or", "pet", "qua"]
_CHANCE = random.Random(0)
WORDS = ["".join(_CHANCE.choices(SYLLABLES, k=_CHANCE.randint(1, 4))) for _ in range(600)]


class Made(NamedTuple):
    """Every record of one small chain."""

    corpus_spec: CorpusSpec
    corpus: Corpus
    tokenizer: TokenizerFiles
    shards_spec: ShardsSpec
    shards: TokenShards


def write_jsonl(path: Path, documents: int, seed: int = 0) -> Path:
    """Passages of made-up English."""
    chance = random.Random(seed)
    lines = [
        json.dumps({"id": f"{seed}-{number}", "text": " ".join(chance.choices(WORDS, k=chance.randint(5, 100)))})
        for number in range(documents)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    corpus_spec = CorpusSpec(source=str(write_jsonl(root / "text.jsonl", 3000)), split=(800, 150, 50))
    corpus = build_corpus(corpus_spec, root)
    tokenizer = build_tokenizer(TokenizerSpec(vocab_size=300), corpus_spec, corpus, root)
    shards_spec = ShardsSpec(shard_tokens=50_000, workers=2)
    return Made(
        corpus_spec, corpus, tokenizer, shards_spec, build_shards(shards_spec, corpus_spec, corpus, tokenizer, root)
    )
