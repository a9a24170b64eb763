"""Generated English, and every record of a small chain of data stages from it."""

import json
import random
from pathlib import Path
from typing import NamedTuple

from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards
from t5train.spec import CorpusSpec, ShardsSpec

SYLLABLES = ["ba", "cor", "dine", "el", "fru", "gis", "ha", "il", "jo", "kern", "lum", "mo", "nes", "or", "pet", "qua"]
_CHANCE = random.Random(0)
WORDS = ["".join(_CHANCE.choices(SYLLABLES, k=_CHANCE.randint(1, 4))) for _ in range(600)]


class DataChain(NamedTuple):
    """Every record of one small chain."""

    corpus_spec: CorpusSpec
    corpus: Corpus
    tokenizer: TokenizerFiles
    shards_spec: ShardsSpec
    shards: TokenShards


def write_jsonl(path: Path, documents: int, seed: int = 0) -> Path:
    """Passages of generated English."""
    chance = random.Random(seed)
    lines = [
        json.dumps({"id": f"{seed}-{number}", "text": " ".join(chance.choices(WORDS, k=chance.randint(5, 100)))})
        for number in range(documents)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
