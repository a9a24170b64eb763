"""Samples of token shards as text: what the model gets, and what it is to predict."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from t5train.data.loader import Samples
from t5train.data.passages import Split
from t5train.data.tokenizer import Tokenizer
from t5train.records.stage_records import TokenizerFiles, TokenShards
from t5train.spec import RunSpec


class ShownSample(NamedTuple):
    """One sample. In ``inputs`` and ``targets``, which are text, special ids have names such as ``<extra_id_0>``."""

    sample_id: int
    input_ids: list[int]
    target_ids: list[int]
    inputs: str
    targets: str


def shown_samples(
    spec: RunSpec, tokenizer: TokenizerFiles, shards: TokenShards, split: Split, start: int, count: int
) -> Iterator[ShownSample]:
    """Yield samples ``start`` to ``start + count`` (exclusive) of a split, in the order in which a run uses them.

    Raises InputError if the split has no whole window.
    """
    vocabulary = Tokenizer.load(tokenizer.path)
    samples = Samples(shards, split, spec.objective, spec.optimizer.seed)
    batch = samples.batch(start, count)
    for sample_id, inputs, targets in zip(*batch, strict=True):
        yield ShownSample(
            int(sample_id), inputs.tolist(), targets.tolist(), shown(vocabulary, inputs), shown(vocabulary, targets)
        )


def shown(vocabulary: Tokenizer, ids: np.ndarray) -> str:
    """Return ids as text. Special ids stand between spaces; characters without a piece are shown as ``<unk>``."""
    sentinels = {sentinel: f"<extra_id_{index}>" for index, sentinel in enumerate(vocabulary.sentinel_ids)}
    words: list[str] = []
    for each in ids.tolist():
        name = sentinels.get(each)
        words.append(f" {name} " if name else vocabulary.piece(each))
    return " ".join("".join(words).split())
