"""The simplest language model, the bar that a trained one must clear: token frequencies of the train split.

The shards stage counts how often each id occurs while it writes the tokens, so nothing reads them again for it.
"""

import numpy as np

from t5train.data.shards import UNIGRAM_DTYPE, unigram_name
from t5train.errors import DigestMismatch
from t5train.records import TokenShards


def train_unigram(shards: TokenShards) -> np.ndarray:
    """Log-probability in nats of each id, float64 [vocab_size], by add-one-smoothed counts of the train split.

    Raises DigestMismatch when the counts do not add up to the tokens of the split.
    """
    vocab_size, tokens = int(shards.counts["vocab_size"]), int(shards.counts["train_tokens"])
    counts = np.zeros(vocab_size, dtype=np.int64)
    for number in range(int(shards.counts["num_shards"])):
        path = shards.path / unigram_name(number)
        if path.stat().st_size != counts.nbytes:
            raise DigestMismatch(f"{path} has {path.stat().st_size} bytes, not {counts.nbytes}: run the shards stage")
        counts += np.fromfile(path, UNIGRAM_DTYPE)
    if counts.sum() != tokens:
        raise DigestMismatch(f"{shards.path}: {counts.sum()} train tokens counted, not {tokens}: run the shards stage")
    return np.asarray(np.log((counts + 1) / (tokens + vocab_size)))


def cross_entropy(log_probabilities: np.ndarray, tokens: np.ndarray) -> float:
    """Mean negative log-probability of ``tokens`` (any shape, at least one), in nats a token."""
    return float(-log_probabilities[tokens].mean())
