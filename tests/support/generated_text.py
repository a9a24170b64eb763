"""Generated text of made-up words, and the records of a small chain of data stages."""

import json
import random
from pathlib import Path
from typing import NamedTuple

from t5train.records.stage_records import Corpus, TokenizerFiles, TokenShards
from t5train.spec import CorpusSpec, RunSpec, ShardsSpec

SYLLABLES = ["ba", "cor", "dine", "el", "fru", "gis", "ha", "il", "jo", "kern", "lum", "mo", "nes", "or", "pet", "qua"]
_GENERATOR = random.Random(0)
WORDS = ["".join(_GENERATOR.choices(SYLLABLES, k=_GENERATOR.randint(1, 4))) for _ in range(600)]
ODD_CHARACTERS = (
    "\u0085\u00a0\u1680\u2003\u2028\u2029\u3000\t\n\x0b\x0c\r\x1c\x1f\u2581 "
    "\u0300\u0301\u0308\u030f\u0327\u0340\u0345\u0349\u05b0\u0652\u093c\u094d\u0e33\u3099\uff9e\u20dd\ufe0f\u0600\u06dd\u0d4e"
    "\u200b\u200c\u200d\u00ad\ufeff\u2060\U0001f468\U0001f469\U0001f3fb\U0001f1e6\U0001f1e7\u2764"
    "aeyAu1.\u00e9\uff21\uff2f\uff14\ufb04\u2460\u2488\u210c\u1100\u1161\u11a8\uac00\uff76\u30ab\u0915\u0e01\u1ef3\u3131\u314f\ufdfa"
)
"""Spaces, marks, joiners and letters that normalisation changes, and some that it does not."""

TINY = {
    "tokenizer.vocab_size": 300,
    "model.d_model": 32,
    "model.d_ff": 64,
    "objective.input_tokens": 32,
    "optimizer.num_steps": 100,
    "optimizer.warmup_steps": 10,
    "storage.checkpoint_every_steps": 50,
    "storage.validate_every_steps": 100,
    "storage.validate_sequences": 32,
}
"""Settings with which the recipe ``smoke`` trains on such text within seconds."""


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


def write_copies(path: Path) -> Path:
    """Write 300 passages, the first 100 of them once more at the end, with other ids."""
    lines = write_jsonl(path, 300).read_text().splitlines()
    again = [json.dumps(json.loads(line) | {"id": f"again-{number}"}) for number, line in enumerate(lines[:100])]
    path.write_text("\n".join([*lines, *again]) + "\n")
    return path


def make_shards(spec: RunSpec, root: Path) -> tuple[TokenizerFiles, TokenShards]:
    """Run the data stages of a run under a root. Returns its vocabulary and token shards."""
    from t5train.data.corpus import build_corpus
    from t5train.data.shards import build_shards
    from t5train.data.vocabulary.tokenizer import build_tokenizer

    corpus = build_corpus(spec.corpus, root)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root)
    return tokenizer, build_shards(spec.shards, spec.corpus, corpus, tokenizer, root)
