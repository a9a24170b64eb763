"""Generated text of made-up words, and the records of a small chain of data stages."""

import json
import random
from pathlib import Path
from typing import NamedTuple

from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards
from t5train.spec import CorpusSpec, ShardsSpec

SYLLABLES = ["ba", "cor", "dine", "el", "fru", "gis", "ha", "il", "jo", "kern", "lum", "mo", "nes", "or", "pet", "qua"]
_GENERATOR = random.Random(0)
WORDS = ["".join(_GENERATOR.choices(SYLLABLES, k=_GENERATOR.randint(1, 4))) for _ in range(600)]


class DataChain(NamedTuple):
    """Specs and records of a small chain of data stages."""

    corpus_spec: CorpusSpec
    corpus: Corpus
    tokenizer: TokenizerFiles
    shards_spec: ShardsSpec
    shards: TokenShards


def write_jsonl(path: Path, documents: int, seed: int = 0) -> Path:
    """Write documents of made-up words as JSON lines, and return the path."""
    generator = random.Random(seed)
    lines = [
        json.dumps({"id": f"{seed}-{number}", "text": " ".join(generator.choices(WORDS, k=generator.randint(5, 100)))})
        for number in range(documents)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
