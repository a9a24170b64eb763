"""Samples of several texts in one order."""

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.corpus import build_corpus
from t5train.data.samples import mixture
from t5train.data.samples.loader import Samples, Windows, require_enough_samples
from t5train.data.samples.mixture import BLOCK, Mixture, numbers_of_texts, rates
from t5train.data.samples.span_corruption import geometry
from t5train.data.shards import build_shards, read_description
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.errors import InputError
from t5train.records.stage_records import TokenShards
from t5train.spec import CorpusSpec, ObjectiveSpec, ShardsSpec, TokenizerSpec
from t5train.spec.recipes import recipe
from tests.support.generated_text import write_jsonl

OBJECTIVE = ObjectiveSpec(input_tokens=64)
ORDER = [
    *((498, 54), (713, 54), (451, 55), (158, 55), (51, 623), (18, 233)),
    *((90, 55), (861, 55), (346, 55), (678, 55), (740, 55), (769, 55)),
]


def objective(**settings: Any) -> ObjectiveSpec:
    return ObjectiveSpec(input_tokens=64, **settings)


def placed(sizes: list[int], count: int, seed: int = 0, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    return Mixture(sizes, rates(sizes, objective(**settings)), seed).placed(np.arange(count))


def test_rates_are_those_of_t5() -> None:
    """Raffel et al. 2020, section 3.5.2: min(e, K), to the power of 1/T, divided by their sum."""
    assert rates([100, 300], objective()) == [Fraction(1, 4), Fraction(3, 4)]
    assert rates([100, 300], objective(mixing_limit=100)) == [Fraction(1, 2), Fraction(1, 2)]
    assert rates([100, 900], objective(mixing_temperature=2)) == [Fraction(1, 4), Fraction(3, 4)]
    assert rates([1, 2], objective(mixing_weights=(3, 1))) == [Fraction(3, 4), Fraction(1, 4)]
    sizes, temperature, limit = [5, 1_000, 10**9], 3.7, 10**6
    expected = np.array([min(size, limit) for size in sizes]) ** (1 / temperature)
    found = rates(sizes, objective(mixing_temperature=temperature, mixing_limit=limit))
    assert np.allclose(list(map(float, found)), expected / expected.sum(), rtol=1e-12)


@given(
    st.lists(st.integers(1, 10**10), min_size=2, max_size=20),
    st.floats(1, 20),
    st.lists(st.integers(0, 10**12), min_size=2, max_size=10),
)
def test_of_any_number_of_samples_each_text_has_its_share(
    sizes: list[int], temperature: float, counts: list[int]
) -> None:
    shares = rates(sizes, objective(mixing_temperature=temperature))
    before = [0] * len(sizes)
    for count in sorted(counts):
        numbers = numbers_of_texts(shares, count)
        assert sum(numbers) == count
        assert all(now >= earlier for now, earlier in zip(numbers, before, strict=True))
        assert all(abs(each - share * count) <= len(sizes) for each, share in zip(numbers, shares, strict=True))
        before = numbers


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=5),
    st.integers(0, 2**40),
    st.integers(1, 300),
    st.integers(0, 2**63),
)
def test_a_sample_depends_only_on_its_position(sizes: list[int], start: int, count: int, seed: int) -> None:
    mixed = Mixture(sizes, rates(sizes, OBJECTIVE), seed)
    whole = mixed.placed(np.arange(start, start + count))
    one_by_one = [mixed.placed(np.array([position])) for position in range(start, start + count, 37)]
    assert whole.ids[::37].tolist() == [each.ids[0] for each in one_by_one]
    assert whole.epochs[::37].tolist() == [each.epochs[0] for each in one_by_one]
    assert 0 <= whole.ids.min() <= whole.ids.max() < sum(sizes)


def test_each_text_has_its_share_of_every_block_and_goes_through_epochs_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixture, "BLOCK", 1000)
    sizes = [300, 77]
    ids, epochs = placed(sizes, 5000, mixing_weights=(0.6, 0.4))
    is_first = ids < sizes[0]
    assert is_first.reshape(5, 1000).sum(axis=1).tolist() == [600] * 5
    assert (is_first[:1000] != is_first[1000:2000]).any(), "the order of texts is new in each block"
    for of_text, first, size in ((is_first, 0, 300), (~is_first, 300, 77)):
        seen = Counter(zip(epochs[of_text].tolist(), ids[of_text].tolist(), strict=True))
        assert max(seen.values()) == 1, "a sample is used once in an epoch"
        for epoch in range(int(epochs[of_text].max())):  # all but the last one are whole
            assert {each for at, each in seen if at == epoch} == set(range(first, first + size))
    assert (np.diff(epochs[is_first]) >= 0).all(), "no sample is repeated before all others were used"
    orders = [ids[is_first & (epochs == epoch)].tolist() for epoch in range(2)]
    assert sorted(orders[0]) != orders[0] != orders[1]


def test_the_order_stays_what_it_was() -> None:
    """Runs are resumed by it: another order needs another ORDER_VERSION."""
    sizes = [50, 7, 900]
    mixed = Mixture(sizes, rates(sizes, objective(mixing_temperature=2)), 3)
    ids, epochs = mixed.placed(np.arange(BLOCK - 6, BLOCK + 6))
    assert list(zip(ids.tolist(), epochs.tolist(), strict=True)) == ORDER


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Token shards of 600 passages, mixed with 200 others in a file of the same name."""
    root = tmp_path_factory.mktemp("mixed")
    for name, documents, seed in (("one", 600, 1), ("two", 200, 2)):
        (root / name).mkdir()
        write_jsonl(root / name / "text.jsonl", documents, seed)
    return shards_of(root, CorpusSpec(source=f"{root}/one", mixed_with=(f"{root}/two",)))


def shards_of(root: Path, spec: CorpusSpec) -> TokenShards:
    corpus = build_corpus(spec, root / "root")
    tokenizer = build_tokenizer(TokenizerSpec(vocab_size=300), spec, corpus, root / "root")
    return build_shards(ShardsSpec(shard_tokens=16384, workers=1), spec, corpus, tokenizer, root / "root")


@pytest.mark.slow
def test_a_shard_holds_one_text_only_and_passages_are_split_as_without_the_mixture(mixed: TokenShards) -> None:
    descriptions = [read_description(mixed.path, number) for number in range(int(mixed.counts["num_shards"]))]
    parts = [each.part for each in descriptions]
    assert parts == sorted(parts)
    assert set(parts) == {0, 1}
    root = mixed.path.parents[2]
    alone = [shards_of(root, CorpusSpec(source=f"{root}/{name}")) for name in ("one", "two")]
    for split in ("train", "validation", "test"):
        documents = [0, 0]
        for part, each in zip(parts, descriptions, strict=True):
            documents[part] += each.splits[split].documents
        assert documents == [each.counts[f"{split}_documents"] for each in alone]


def test_training_draws_each_text_at_its_rate_and_measures_all_held_out_text(mixed: TokenShards) -> None:
    windows = Windows(mixed, "train", geometry(OBJECTIVE).window_tokens)
    samples = Samples(mixed, "train", objective(mixing_weights=(1, 3)), seed=0)
    batch = samples.batch(0, 2000)
    is_second = batch.sample_ids >= windows.of_texts[0]
    assert 0.7 < is_second.mean() < 0.8
    assert batch.epochs[is_second].max() > batch.epochs[~is_second].max()
    for split in ("validation", "test"):
        held_out = Samples(mixed, split, OBJECTIVE, seed=0)
        assert sorted(held_out.batch(0, held_out.num_samples).sample_ids) == list(range(held_out.num_samples))


def test_a_text_with_too_little_to_train_on_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "much.jsonl", 600, 1)
    (tmp_path / "little.txt").write_text("one line\nanother line\n")
    shards = shards_of(tmp_path, CorpusSpec(source=f"{tmp_path}/much.jsonl", mixed_with=(f"{tmp_path}/little.txt",)))
    spec = recipe("smoke").with_settings({"corpus.mixed_with": ["x"], "corpus.source": "y"})
    with pytest.raises(InputError, match=r"'x' has less text for training than a sample needs"):
        require_enough_samples(spec, shards)
