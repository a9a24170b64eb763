"""Samples of token shards as text: what the model gets, and what it is to predict."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from t5train.data.passages import Split
from t5train.data.samples.loader import Samples
from t5train.data.vocabulary.tokenizer import Tokenizer
from t5train.errors import InputError
from t5train.quantities import quantity
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

    There are fewer at the end. Raises InputError if ``start`` is beyond it, or if the split has no whole window.
    """
    vocabulary = Tokenizer.load(tokenizer.path)
    samples = Samples(shards, split, spec.objective, spec.optimizer.seed)
    of_run = spec.optimizer.num_steps * spec.optimizer.global_batch_sequences if split == "train" else 0
    end = max(samples.num_samples, of_run)  # of the split, or of the run's last epoch
    if start >= end:
        used = f" and the run takes {end:,}, in several epochs" if end > samples.num_samples else ""
        raise InputError(
            f"--start is {start:,}, but the {split} split has {quantity(samples.num_samples, 'sample')}{used}. "
            f"Positions are 0 to {end - 1:,}"
        )
    batch = samples.batch(start, min(count, end - start))
    for sample_id, inputs, targets in zip(batch.sample_ids, batch.inputs, batch.targets, strict=True):
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
