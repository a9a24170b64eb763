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
    end = _end(spec, samples.num_samples, split)
    if start >= end:
        raise InputError(_beyond(samples.num_samples, split, start, end))
    batch = samples.batch(start, min(count, end - start))
    for sample_id, inputs, targets in zip(batch.sample_ids, batch.inputs, batch.targets, strict=True):
        yield ShownSample(
            int(sample_id), inputs.tolist(), targets.tolist(), shown(vocabulary, inputs), shown(vocabulary, targets)
        )


def _end(spec: RunSpec, num_samples: int, split: Split) -> int:
    """Return the position after the last sample that there is to see: of the split, or of the run's last epoch."""
    return max(num_samples, spec.optimizer.num_steps * spec.optimizer.global_batch_sequences * (split == "train"))


def _beyond(num_samples: int, split: Split, start: int, end: int) -> str:
    used = f" and the run takes {end:,}, in several epochs" if end > num_samples else ""
    return (
        f"--start is {start:,}, but the {split} split has {quantity(num_samples, 'sample')}{used}. Positions are 0 to "
        f"{end - 1:,}"
    )


def shown(vocabulary: Tokenizer, ids: np.ndarray) -> str:
    """Return ids as text. Special ids stand between spaces; characters without a piece are shown as ``<unk>``."""
    sentinels = {sentinel: f"<extra_id_{index}>" for index, sentinel in enumerate(vocabulary.sentinel_ids)}
    words: list[str] = []
    for each in ids.tolist():
        name = sentinels.get(each)
        words.append(f" {name} " if name else vocabulary.piece(each))
    return " ".join("".join(words).split())
