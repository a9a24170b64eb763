"""Measurements on held-out pairs, which are those of plain arithmetic on any number of ranks."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from t5train.data.samples.loader import Batch, Segments
from t5train.data.vocabulary.sentencepiece_model import UNK_ID
from t5train.records.stage_records import PairShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from t5train.train import validation
from t5train.train.datasets import pair_dataset
from t5train.train.datasets.pair_dataset import PairDataset

TOKENS = [3, 1, 2, 4, 1]
"""Target tokens of each held-out pair, of task 0, 1, 0, 1, 0."""
LOSSES = [[1.0, 2.0, 3.0], [5.0], [1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [4.0]]
UNKNOWN, CUT = 4, 2
"""The pairs, of all of whose tokens the model is right in one test, whose target has an unknown piece, or was cut."""
HITS = [[True, False, True], [True], [True, True], [True, True, True, False], [False]]


class HeldOut:
    """Five pairs, which repeat."""

    num_samples = len(TOKENS)
    longest_target = max(TOKENS)
    first_ids: Mapping[int, int] = {}
    """Those of targets that do not begin with 1."""

    def __init__(self, *_arguments: object) -> None:
        """Take what PairSamples take."""

    def batch(self, start: int, count: int, *, shuffled: bool) -> Batch:
        assert not shuffled
        ids = np.arange(start, start + count) % self.num_samples
        width = max(TOKENS[each] for each in ids)
        is_real = np.array([[1] * TOKENS[each] + [0] * (width - TOKENS[each]) for each in ids])
        targets = is_real.copy()
        targets[:, 0] = [self.first_ids.get(each, 1) for each in ids]
        return Batch(ids, np.zeros(count, int), targets, targets, Segments(is_real, is_real, None, None, 0))

    def have_cut_targets(self, sample_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(sample_ids), bool)

    def task_of(self, sample_ids: np.ndarray) -> np.ndarray:
        return sample_ids % 2


class Predictions:
    """Passes whose results are LOSSES and HITS; padding, whose results must not count, gets others."""

    def predictions(self, batches: Sequence[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self._padded(LOSSES, batch, 99.0), self._padded(HITS, batch, True)) for batch in batches]

    def _padded(self, values: Sequence[list[Any]], batch: Batch, padding: Any) -> np.ndarray:
        width = batch.targets.shape[1]
        return np.array([[*values[each], *[padding] * (width - TOKENS[each])] for each in batch.sample_ids])


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> PairDataset:
    monkeypatch.setattr(pair_dataset, "PairSamples", HeldOut)
    monkeypatch.setattr(pair_dataset, "require_enough_pairs", lambda _spec, _shards: None)
    counts = {"test_pairs": 0, "validation_cut": 3}
    shards = PairShards(path=Path("shards"), fingerprint="5" * 64, files={}, counts=counts)
    return PairDataset(shards, spec())


def spec(ranks: int = 1) -> RunSpec:
    settings = {"pairs.train": ["a.jsonl", "b.jsonl"], "layout.micro_batch_sequences": 2}
    settings |= {"optimizer.global_batch_sequences": 12, "cluster.ranks": ranks}
    return recipe("smoke").with_settings(settings)


@pytest.mark.parametrize("ranks", [1, 3])
def test_loss_accuracy_and_exact_match_count_each_real_token_and_pair_once_on_any_number_of_ranks(
    dataset: PairDataset, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    gathered: list[list[float]] = []
    monkeypatch.setattr(dataset, "_spec", spec(ranks))
    monkeypatch.setattr(pair_dataset, "gather_floats", lambda sums: gathered.append(sums) or gathered)
    for rank in range(ranks):
        monkeypatch.setattr(validation, "data_rank", lambda _spec, rank=rank: rank)
        found = dataset.validate(cast(Any, Predictions()))
    assert found.values == pytest.approx(
        {
            "validation_loss": 19 / 11,
            "validation_token_accuracy": 8 / 11,
            "validation_exact_match": 2 / 5,
            "validation_loss_of_task_0": 12 / 6,
            "validation_token_accuracy_of_task_0": 4 / 6,
            "validation_exact_match_of_task_0": 1 / 3,
            "validation_loss_of_task_1": 7 / 5,
            "validation_token_accuracy_of_task_1": 4 / 5,
            "validation_exact_match_of_task_1": 1 / 2,
        }
    )
    counts = {"validation_pairs": 5, "validation_target_tokens": 11}
    counts |= {"validation_pairs_of_task_0": 3, "validation_target_tokens_of_task_0": 6}
    assert found.counts == counts | {"validation_pairs_of_task_1": 2, "validation_target_tokens_of_task_1": 5}


def test_a_target_that_was_cut_or_has_an_unknown_piece_is_no_exact_match(
    dataset: PairDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_dataset, "gather_floats", lambda sums: [sums])
    monkeypatch.setattr(validation, "data_rank", lambda _spec: 0)
    monkeypatch.setattr(sys.modules[__name__], "HITS", [[True] * tokens for tokens in TOKENS])
    assert dataset.validate(cast(Any, Predictions())).values["validation_exact_match"] == 1
    monkeypatch.setattr(HeldOut, "have_cut_targets", lambda _self, ids: ids % len(TOKENS) == CUT)
    assert dataset.validate(cast(Any, Predictions())).values["validation_exact_match"] == 4 / 5
    monkeypatch.setattr(HeldOut, "first_ids", {UNKNOWN: UNK_ID})
    found = dataset.validate(cast(Any, Predictions())).values
    assert (found["validation_exact_match"], found["validation_token_accuracy"]) == (3 / 5, 1)


def test_a_test_split_without_pairs_is_not_measured(dataset: PairDataset) -> None:
    assert dataset.test(cast(Any, Predictions())) == {}


def test_what_was_cut_and_the_longest_target_are_recorded(dataset: PairDataset) -> None:
    assert dataset.described()["data"]["validation_cut"] == 3
    assert dataset.described()["data"]["longest_train_target"] == 4


def test_files_of_pairs_are_named_without_local_folders_and_credentials(
    dataset: PairDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["/home/me/private/a.jsonl#prefix=to b/c: &task=a", "hf://someone/pairs#source=x.y&task=b"]
    monkeypatch.setattr(dataset, "_spec", spec().with_settings({"pairs.train": named}))
    described = dataset.described()
    assert described["settings"]["pairs"]["train"] == ["a.jsonl#prefix=to b/c: &task=a", named[1]]
    assert [(each.task, each.prefix) for each in described["tasks"]] == [("a", "to b/c: "), ("b", "")]
