"""The unigram bar."""

import numpy as np
import pytest

from t5train.data.shards import tokens_name
from t5train.data.unigram import cross_entropy, train_unigram

from .conftest import Made


def test_probabilities_are_smoothed_frequencies_of_the_train_split(made: Made) -> None:
    log_probabilities = train_unigram(made.shards)
    num_tokens, vocab_size = int(made.shards.counts["train_tokens"]), int(made.shards.counts["vocab_size"])
    assert np.exp(log_probabilities).sum() == pytest.approx(1)
    ends = int(made.shards.counts["train_documents"])
    assert np.exp(log_probabilities[1]) == pytest.approx((ends + 1) / (num_tokens + vocab_size))
    assert np.exp(log_probabilities[-1]) == pytest.approx(1 / (num_tokens + vocab_size))


def test_the_cross_entropy_of_the_train_split_is_its_entropy(made: Made) -> None:
    log_probabilities = train_unigram(made.shards)
    tokens = np.concatenate(
        [
            np.fromfile(made.shards.path / tokens_name("train", number), "<u2")
            for number in range(int(made.shards.counts["num_shards"]))
        ]
    )
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / counts.sum()
    assert cross_entropy(log_probabilities, tokens) == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-3)
    assert cross_entropy(log_probabilities, np.array([[1]])) == pytest.approx(-log_probabilities[1])
