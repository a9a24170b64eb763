"""The unigram baseline, which the model must beat."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from t5train.data.shards import tokens_name, unigram_name
from t5train.errors import DigestMismatch
from t5train.train.validation import cross_entropy, train_unigram
from tests.support.generated_text import DataChain


def test_probabilities_are_smoothed_frequencies_of_the_train_split(data_chain: DataChain) -> None:
    log_probabilities = train_unigram(data_chain.shards)
    num_tokens, vocab_size = int(data_chain.shards.counts["train_tokens"]), int(data_chain.shards.counts["vocab_size"])
    assert np.exp(log_probabilities).sum() == pytest.approx(1)
    ends = int(data_chain.shards.counts["train_documents"])
    assert np.exp(log_probabilities[1]) == pytest.approx((ends + 1) / (num_tokens + vocab_size))
    assert np.exp(log_probabilities[-1]) == pytest.approx(1 / (num_tokens + vocab_size))


def test_the_cross_entropy_of_the_train_split_is_its_entropy(data_chain: DataChain) -> None:
    log_probabilities = train_unigram(data_chain.shards)
    tokens = np.concatenate(
        [
            np.fromfile(data_chain.shards.path / tokens_name("train", number), "<u2")
            for number in range(int(data_chain.shards.counts["num_shards"]))
        ]
    )
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / counts.sum()
    assert cross_entropy(log_probabilities, tokens) == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-3)
    assert cross_entropy(log_probabilities, np.array([[1]])) == pytest.approx(-log_probabilities[1])


def test_token_counts_match_the_tokens_and_are_in_the_manifest(data_chain: DataChain) -> None:
    for number in range(int(data_chain.shards.counts["num_shards"])):
        tokens = np.fromfile(data_chain.shards.path / tokens_name("train", number), "<u2")
        counts = np.fromfile(data_chain.shards.path / unigram_name(number), "<i8")
        assert counts.tolist() == np.bincount(tokens, minlength=int(data_chain.shards.counts["vocab_size"])).tolist()
        assert unigram_name(number) in data_chain.shards.files


def test_unigram_frequencies_are_computed_without_reading_tokens(data_chain: DataChain, tmp_path: Path) -> None:
    for number in range(int(data_chain.shards.counts["num_shards"])):
        shutil.copy(data_chain.shards.path / unigram_name(number), tmp_path)
    moved = data_chain.shards.model_copy(update={"path": tmp_path})
    assert (train_unigram(moved) == train_unigram(data_chain.shards)).all()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def add_a_token(path: Path) -> None:
    counts = np.fromfile(path, "<i8")
    counts[3] += 1
    path.write_bytes(counts.tobytes())


@pytest.mark.parametrize(("damage", "what"), [(shorten, "bytes, not"), (add_a_token, "train tokens counted, not")])
def test_damaged_token_counts_are_refused(
    data_chain: DataChain, tmp_path: Path, damage: Callable[[Path], None], what: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(data_chain.shards.path, folder)
    damage(folder / unigram_name(1))
    with pytest.raises(DigestMismatch, match=what):
        train_unigram(data_chain.shards.model_copy(update={"path": folder}))
