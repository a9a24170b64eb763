"""The simplest language model, the bar that a trained one must clear: token frequencies of the train split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

from t5train.data.shards import tokens_name
from t5train.errors import InputError
from t5train.progress import Progress, silent
from t5train.records import TokenShards

_CHUNK_TOKENS = 16 << 20


class Unigram:
    """``log_probabilities`` float64 [vocab_size], in nats, of add-one-smoothed counts."""

    def __init__(self, counts: np.ndarray) -> None:
        smoothed = counts.astype(np.float64) + 1
        self.log_probabilities = np.log(smoothed / smoothed.sum())

    @classmethod
    def of(cls, shards: TokenShards, progress: Progress = silent) -> Self:
        """Fitted to every token of the train split, EOS included."""
        vocab_size, total = int(shards.counts["vocab_size"]), int(shards.counts["train_tokens"])
        counts = np.zeros(vocab_size, dtype=np.int64)
        for path, tokens in _train_tokens(shards):
            if int(tokens.max()) >= vocab_size:
                raise InputError(f"{path} has the id {tokens.max()}: the vocabulary ends at {vocab_size - 1}")
            counts += np.bincount(tokens, minlength=vocab_size)
            progress("tokens counted", int(counts.sum()), total)
        return cls(counts)

    def cross_entropy(self, tokens: np.ndarray) -> float:
        """Mean negative log-probability of ``tokens`` (any shape, at least one), in nats a token."""
        return float(-self.log_probabilities[tokens].mean())


def _train_tokens(shards: TokenShards) -> Iterator[tuple[Path, np.ndarray]]:
    dtype = np.dtype(f"<u{int(shards.counts['bytes_per_token'])}")
    for number in range(int(shards.counts["num_shards"])):
        path = shards.path / tokens_name("train", number)
        with open(path, "rb") as file:
            while len(tokens := np.fromfile(file, dtype, _CHUNK_TOKENS)):
                yield path, tokens
