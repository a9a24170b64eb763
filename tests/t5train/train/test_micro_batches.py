"""Micro-batches of pairs, as the ranks of a run take them."""

from collections import Counter
from pathlib import Path

import pytest

from t5train.data.pairs.pair_samples import PairSamples
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from t5train.train import loop
from tests.support.made_pairs import IdsOfPair, made_pair_shards

ROW = (20, 12)
RANKS, PASSES, MICRO, STEPS = 2, 3, 2, 4
DONE = 2
"""Steps that a resumed run does not take again."""


def test_each_micro_batch_of_pairs_knows_the_target_tokens_of_the_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged: list[IdsOfPair] = [([5] * 18 + [1], [5] * (number % 11) + [1]) for number in range(40)]
    samples = PairSamples(made_pair_shards(tmp_path / "made", [{"train": ragged}], ROW), "train", _spec().pairs, 0)
    stated, counted = list[list[int]](), Counter[int]()
    for rank in range(RANKS):
        monkeypatch.setattr(loop, "data_rank", lambda _, rank=rank: rank)
        batches = [batch.segments for batch in loop.micro_batches(samples, _spec(), DONE)]
        stated.append([segments.global_targets for segments in batches if segments])
        for number, segments in enumerate(batches):
            assert segments is not None
            counted[number // PASSES] += int((segments.targets > 0).sum())
    assert stated == RANKS * [[counted[step] for step in range(STEPS - DONE) for _ in range(PASSES)]]
    assert len(set(counted.values())) == STEPS - DONE, "steps of one length would prove nothing"


def _spec() -> RunSpec:
    return recipe("smoke").with_settings(
        {
            "pairs.train": ["a.jsonl"],
            "optimizer.num_steps": STEPS,
            "optimizer.warmup_steps": 1,
            "optimizer.global_batch_sequences": RANKS * PASSES * MICRO,
            "layout.micro_batch_sequences": MICRO,
            "cluster.ranks": RANKS,
        }
    )
