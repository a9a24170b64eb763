"""Pairs of source and target, of which a model learns to give the target for the source.

Rows of several pairs are trained on, but pairs are measured one in a row. Whether every token of a target is the most
likely one, given those before it, is whether greedy decoding gives that target. It never gives the text of a target
that was cut or has an unknown piece.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.pairs.task_rates import require_enough_pairs
from t5train.data.passages import SPLITS
from t5train.data.samples.loader import Batch
from t5train.data.vocabulary.sentencepiece_model import UNK_ID
from t5train.data.vocabulary.unknown_pieces import recorded_unknown
from t5train.engine.collectives import gather_floats
from t5train.engine.forward_backward import Passes
from t5train.records.locations import shareable_source
from t5train.records.metrics import SHUFFLED_OF_TARGETS, UNIGRAM_OF_TARGETS, Values, of_task
from t5train.records.stage_records import PairShards
from t5train.records.witness import LONGEST_TRAIN_TARGET, TrainedTask
from t5train.spec import RunSpec
from t5train.spec.pairs_spec import location_of
from t5train.train.datasets.dataset import Measured
from t5train.train.validation import cross_entropy, places_of_rank, train_unigram, validation_sequences

_SUMS = 5


class PairDataset:
    """Rows of pair shards. Raises InputError if there are too few."""

    def __init__(self, shards: PairShards, spec: RunSpec) -> None:
        require_enough_pairs(spec, shards)
        self.shards, self._spec = shards, spec
        self.train = self._samples("train", dropout=spec.has_dropout)
        self.held_out = self._samples("validation")

    def validate(self, passes: Passes) -> Measured:
        """See Dataset."""
        return self._measured(passes, self.held_out, "validation")

    def shuffled(self, passes: Passes) -> Values:
        """See Dataset."""
        sums = self._sums(passes, self.held_out, shuffled=True).sum(axis=0)
        return {SHUFFLED_OF_TARGETS: float(sums[0] / sums[1])}

    def test(self, passes: Passes) -> Values:
        """See Dataset."""
        if not self.shards.counts["test_pairs"]:
            return {}
        found = self._measured(passes, self._samples("test"), "test")
        return {**found.values, **found.counts}

    def baseline(self) -> Mapping[str, float]:
        """See Dataset."""
        batch = self.held_out.batch(0, validation_sequences(self.held_out, self._spec))
        return {UNIGRAM_OF_TARGETS: cross_entropy(train_unigram(self.shards), batch.targets[is_target(batch)])}

    def described(self) -> dict[str, Any]:
        """See Dataset."""
        settings, corpus = self._spec.identity(), self._spec.corpus
        for split in SPLITS:
            settings["pairs"][split] = list(map(_shareable, settings["pairs"][split]))
        units = ("pairs", "rows", "tokens", "cut", "cut_targets", "dropped")
        names = [f"{split}_{unit}{task}" for split in SPLITS for unit in units for task in ("", *self._tasks())]
        counts = {name: int(self.shards.counts[name]) for name in names if name in self.shards.counts}
        counts[LONGEST_TRAIN_TARGET] = self.train.longest_target
        return {
            "settings": settings,
            "data": {**counts, **recorded_unknown(self.shards.counts), "train_samples": self.train.num_samples},
            "license": corpus.license,
            "languages": corpus.languages,
            "tasks": tuple(TrainedTask(task=each.task, prefix=each.prefix) for each in self._spec.pairs.tasks()),
        }

    def _tasks(self) -> list[str]:
        """Return the ends of the names of what is counted by task."""
        return [of_task("", task) for task in range(len(self._spec.pairs.train))]

    def _samples(self, split: str, dropout: bool = False) -> PairSamples:
        return PairSamples(self.shards, split, self._spec.pairs, self._spec.optimizer.seed, dropout)

    def _measured(self, passes: Passes, samples: PairSamples, split: str) -> Measured:
        of_tasks = self._sums(passes, samples)
        values, counts = _named(split, of_tasks.sum(axis=0))
        for task, sums in enumerate(of_tasks if len(of_tasks) > 1 else []):
            if sums[-1]:
                its_values, its_counts = _named(split, sums)
                values |= {of_task(name, task): value for name, value in its_values.items()}
                counts |= {of_task(name, task): value for name, value in its_counts.items()}
        return Measured(values, counts)

    def _sums(self, passes: Passes, samples: PairSamples, shuffled: bool = False) -> np.ndarray:
        """Return the sums of ``_of_pairs`` over all samples that are measured, [tasks, 5]."""
        count, sums = validation_sequences(samples, self._spec), np.zeros((len(self._tasks()), _SUMS))
        ranges = list(places_of_rank(self._spec, count))
        batches = [samples.batch(places.start, len(places), shuffled=shuffled) for places in ranges]
        for places, batch, (losses, is_hit) in zip(ranges, batches, passes.predictions(batches), strict=True):
            held = len(range(places.start, min(places.stop, count)))
            is_whole = ~(samples.have_cut_targets(batch.sample_ids) | (batch.targets == UNK_ID).any(axis=1))
            of_pairs = _of_pairs(losses, is_hit, is_target(batch), is_whole)[:held]
            np.add.at(sums, samples.task_of(batch.sample_ids)[:held], of_pairs)
        total: np.ndarray = np.sum(gather_floats(sums.ravel().tolist()), axis=0).reshape(sums.shape)
        return total


def _shareable(named: str) -> str:
    location = location_of(named)
    return shareable_source(location) + named.removeprefix(location)


def is_target(batch: Batch) -> np.ndarray:
    """Return which target tokens of a batch of pairs are no padding, bool [n, target_tokens]."""
    assert batch.segments is not None  # noqa: S101 - for the type checker: batches of pairs have segments
    return batch.segments.targets > 0


def _of_pairs(losses: np.ndarray, is_hit: np.ndarray, is_real: np.ndarray, is_whole: np.ndarray) -> np.ndarray:
    """Return for each pair: sum of losses, target tokens, tokens hit, whether its whole text is, and 1.

    Arrays are [n, t], and ``is_whole`` [n] is whether the tokens of a target are its whole text.
    """
    of_tokens = (np.where(is_real, losses.astype(np.float64), 0), is_real, is_hit & is_real)
    columns = [each.sum(axis=1) for each in of_tokens]
    is_exact = (is_hit | ~is_real).all(axis=1) & is_whole
    return np.stack([*columns, is_exact, np.ones(len(losses))], axis=1).astype(np.float64)


def _named(split: str, sums: np.ndarray) -> tuple[Values, Values]:
    loss, tokens, hits, exact, pairs = sums.tolist()
    values: Values = {
        f"{split}_loss": loss / tokens,
        f"{split}_token_accuracy": hits / tokens,
        f"{split}_exact_match": exact / pairs,
    }
    return values, {f"{split}_pairs": int(pairs), f"{split}_target_tokens": int(tokens)}
