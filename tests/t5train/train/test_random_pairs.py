"""The rows of pairs that a benchmark of steps trains on: random ones, and those of shards."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from t5train.data.vocabulary.held_out import HELD_OUT, HeldOutPassages
from t5train.records.witness import EncodedPassage
from t5train.spec.recipes import recipe
from t5train.train import loop
from t5train.train.step_benchmark import BenchmarkJob, _batches, random_batch, tokens_a_step
from tests.support.made_pairs import made_pair_shards


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


def test_rows_of_pair_shards_are_read_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "data_rank", lambda _spec: 0)
    pairs = {"train": [([5, 6, 1], [7, 1])] * 40, "validation": [([5, 1], [7, 8, 1])]}
    shards = made_pair_shards(tmp_path / "shards", [pairs], (16, 8))
    held_out = HeldOutPassages(passages=[EncodedPassage(text="a", ids=[1])])
    (shards.path / HELD_OUT).write_text(held_out.model_dump_json())
    settings = {"pairs.train": ["a.jsonl#task=task0"], "pairs.input_tokens": 16, "pairs.target_tokens": 8}
    settings |= {"cluster.ranks": 1, "optimizer.global_batch_sequences": 8, "layout.micro_batch_sequences": 4}
    job = BenchmarkJob(spec=recipe("smoke").with_settings(settings), vocab_size=400, steps=3, shards_folder=shards.path)
    with closing(_batches(job, rank=0)) as batches:
        first, second = next(batches), next(batches)
    assert first.segments is not None
    assert second.segments is not None
    assert first.inputs.shape == (4, 16)
    real = (first.segments.targets > 0).sum() + (second.segments.targets > 0).sum()
    assert first.segments.global_targets == second.segments.global_targets == real
