"""The simplest language model, the bar that a trained one must clear: token frequencies of the train split."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from t5train.data.shards import tokens_name
from t5train.errors import InputError
from t5train.progress import Progress, silent
from t5train.records import TokenShards

_CHUNK_TOKENS = 16 << 20


def train_unigram(shards: TokenShards, progress: Progress = silent) -> np.ndarray:
    """Log-probability in nats of each id, float64 [vocab_size], by add-one-smoothed counts of the train split."""
    vocab_size, total = int(shards.counts["vocab_size"]), int(shards.counts["train_tokens"])
    counts = np.ones(vocab_size, dtype=np.int64)
    done = 0
    for path, tokens in _train_tokens(shards):
        if int(tokens.max()) >= vocab_size:
            raise InputError(f"{path} has the id {tokens.max()}: the vocabulary ends at {vocab_size - 1}")
        counts += np.bincount(tokens, minlength=vocab_size)
        done += len(tokens)
        progress("tokens counted", done, total)
    return np.asarray(np.log(counts / counts.sum()))


def cross_entropy(log_probabilities: np.ndarray, tokens: np.ndarray) -> float:
    """Mean negative log-probability of ``tokens`` (any shape, at least one), in nats a token."""
    return float(-log_probabilities[tokens].mean())


def _train_tokens(shards: TokenShards) -> Iterator[tuple[Path, np.ndarray]]:
    """The train tokens of each shard file, in bounded memory."""
    dtype = np.dtype(f"<u{int(shards.counts['bytes_per_token'])}")
    for number in range(int(shards.counts["num_shards"])):
        path = shards.path / tokens_name("train", number)
        with open(path, "rb") as file:
            while len(tokens := np.fromfile(file, dtype, _CHUNK_TOKENS)):
                yield path, tokens
