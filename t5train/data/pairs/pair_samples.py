"""Samples of pair shards."""

import numpy as np

from t5train.data.samples.loader import Batch
from t5train.records.stage_records import PairShards
from t5train.spec import PairsSpec, RunSpec


class PairSamples:
    """Rows of the train split, and single pairs of the others."""

    def __init__(self, shards: PairShards, split: str, spec: PairsSpec, seed: int, dropout: bool = False) -> None:
        raise NotImplementedError

    @property
    def num_samples(self) -> int:
        """The number of rows of the train split, or of pairs of another one."""
        raise NotImplementedError

    def batch(self, start: int, count: int, shuffled: bool = False) -> Batch:
        """Return samples ``start`` to ``start + count`` (exclusive) of the endless sequence."""
        raise NotImplementedError

    def targets_of(self, start: int, count: int) -> int:
        """Return the number of target tokens of samples ``start`` to ``start + count`` (exclusive)."""
        raise NotImplementedError

    def task_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the task of each sample, int [n]."""
        raise NotImplementedError


def require_enough_pairs(spec: RunSpec, shards: PairShards) -> None:
    """Raise InputError unless the shards have a batch to train on, and a pair to validate on."""
    raise NotImplementedError
