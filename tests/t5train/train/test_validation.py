"""The unigram baseline, which the model must beat."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from t5train.data.shards import tokens_name
from t5train.data.vocabulary.unknown_pieces import unigram_name
from t5train.errors import DigestMismatch
from t5train.train.validation import cross_entropy, train_unigram
from tests.support.generated_text import DataChain


def test_probabilities_are_smoothed_frequencies_and_the_cross_entropy_of_the_train_split_is_its_entropy(
    data_chain: DataChain,
) -> None:
    shards = data_chain.shards
    log_probabilities = train_unigram(shards)
    num_tokens, vocab_size = int(shards.counts["train_tokens"]), int(shards.counts["vocab_size"])
    assert np.exp(log_probabilities).sum() == pytest.approx(1)
    ends = int(shards.counts["train_documents"])
    assert np.exp(log_probabilities[1]) == pytest.approx((ends + 1) / (num_tokens + vocab_size))
    assert np.exp(log_probabilities[-1]) == pytest.approx(1 / (num_tokens + vocab_size))
    files = [shards.path / tokens_name("train", number) for number in range(int(shards.counts["num_shards"]))]
    tokens = np.concatenate([np.fromfile(file, "<u2") for file in files])
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / counts.sum()
    assert cross_entropy(log_probabilities, tokens) == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-3)
    assert cross_entropy(log_probabilities, np.array([[1]])) == pytest.approx(-log_probabilities[1])


def test_unigram_frequencies_are_computed_from_counts_in_the_manifest_without_reading_tokens(
    data_chain: DataChain, tmp_path: Path
) -> None:
    shards = data_chain.shards
    for number in range(int(shards.counts["num_shards"])):
        tokens = np.fromfile(shards.path / tokens_name("train", number), "<u2")
        counts = np.fromfile(shards.path / unigram_name(number), "<i8")
        assert counts.tolist() == np.bincount(tokens, minlength=int(shards.counts["vocab_size"])).tolist()
        assert unigram_name(number) in shards.files
        shutil.copy(shards.path / unigram_name(number), tmp_path)
    assert (train_unigram(shards.model_copy(update={"path": tmp_path})) == train_unigram(shards)).all()


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
