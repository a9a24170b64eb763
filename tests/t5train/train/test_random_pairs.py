"""The random rows of pairs that a benchmark of steps trains on."""

import numpy as np
import pytest

from t5train.spec.recipes import recipe
from t5train.train.step_benchmark import BenchmarkJob, random_batch, tokens_a_step


@pytest.mark.parametrize("dropout_rate", [0.0, 0.1])
def test_random_rows_have_the_lengths_of_pairs_and_keys_where_there_is_dropout(dropout_rate: float) -> None:
    lengths = {"pairs.input_tokens": 50, "pairs.target_tokens": 24}
    spec = recipe("smoke").with_settings(
        {"pairs.train": ["pairs.jsonl"], **lengths, "model.dropout_rate": dropout_rate}
    )
    batch, size = random_batch(BenchmarkJob(spec=spec, vocab_size=300, steps=1), seed=0), spec.layout
    assert batch.segments is not None
    assert batch.inputs.shape == batch.segments.inputs.shape == (size.micro_batch_sequences, 50)
    assert batch.targets.shape == batch.segments.targets.shape == (size.micro_batch_sequences, 24)
    assert all(np.unique(each).tolist() == list(range(1, 9)) for each in batch.segments[:2])
    assert (batch.segments.input_keys is None) == (dropout_rate == 0)
    assert batch.segments.global_targets == spec.optimizer.global_batch_sequences * 24
    assert tokens_a_step(spec) == spec.optimizer.global_batch_sequences * 74
