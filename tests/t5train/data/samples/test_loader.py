"""Samples in a keyed order, and batches prepared ahead."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from t5train.data.samples.loader import Batch, Prefetched, Samples, Windows, drawn_held_out, require_enough_samples
from t5train.data.shards import tokens_name
from t5train.errors import DigestMismatch, InputError
from t5train.records.stage_records import TokenShards
from t5train.spec import ObjectiveSpec
from t5train.spec.recipes import recipe
from tests.support.generated_text import DataChain

OBJECTIVE = ObjectiveSpec(input_tokens=64)


def train(data_chain: DataChain, seed: int = 0) -> Samples:
    return Samples(data_chain.shards, "train", OBJECTIVE, seed)


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own(data_chain: DataChain) -> None:
    samples = train(data_chain)
    first = samples.batch(0, samples.num_samples).sample_ids
    second = samples.batch(samples.num_samples, samples.num_samples).sample_ids
    assert sorted(first) == sorted(second) == list(range(samples.num_samples))
    assert (first != second).any()


def test_a_batch_depends_only_on_its_position_and_not_on_how_it_is_split(data_chain: DataChain) -> None:
    start = train(data_chain).num_samples - 10
    whole = train(data_chain).batch(start, 24)
    samples = train(data_chain)
    parts = [samples.batch(start + offset, 6) for offset in (18, 0, 6, 12)]
    for field in range(3):
        assert (np.concatenate([parts[index][field] for index in (1, 2, 3, 0)]) == whole[field]).all()


def test_the_seed_decides_order_and_noise_of_training_and_noise_is_new_in_each_epoch(data_chain: DataChain) -> None:
    samples, count = train(data_chain, 1), train(data_chain).num_samples
    one, other = samples.batch(0, count), train(data_chain, 2).batch(0, count)
    assert (one.sample_ids != other.sample_ids).any()
    in_order = [batch.inputs[np.argsort(batch.sample_ids)] for batch in (one, other, samples.batch(count, count))]
    for noise in in_order[1:]:
        assert (in_order[0] != noise).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_samples_are_drawn_from_the_whole_split_and_are_the_same_for_every_seed_and_epoch(
    data_chain: DataChain, split: str
) -> None:
    one, other = (Samples(data_chain.shards, split, OBJECTIVE, seed) for seed in (1, 2))
    few = one.num_samples // 4
    first = one.batch(0, few)
    assert max(first.sample_ids) > one.num_samples // 2  # not the first in the order of the files
    assert sorted(one.batch(0, one.num_samples).sample_ids) == list(range(one.num_samples))
    for again in (other.batch(0, few), one.batch(one.num_samples, few)):
        assert all((getattr(again, field) == getattr(first, field)).all() for field in Batch._fields[:4])
    assert (drawn_held_out(few, one.num_samples) == first.sample_ids).all()


def test_sample_k_is_window_k_of_the_shards(data_chain: DataChain) -> None:
    windows = Windows(data_chain.shards, "train", 71)
    tokens = [
        np.fromfile(data_chain.shards.path / tokens_name("train", number), "<u2")
        for number in range(int(data_chain.shards.counts["num_shards"]))
    ]
    expected = np.concatenate([shard[: len(shard) // 71 * 71].reshape(-1, 71) for shard in tokens])
    ids = np.random.default_rng(0).permutation(len(windows))
    assert len(windows) == len(expected)
    assert (windows[ids] == expected[ids]).all()


def test_a_split_without_one_window_is_refused_with_its_counts(data_chain: DataChain) -> None:
    counts = r"the split has [\d,]+ tokens in \d shards?, from \d+ of the text's 3,000 passages"
    with pytest.raises(InputError, match=rf"the test split is too small: a sample needs 99999 .* {counts}"):
        Windows(data_chain.shards, "test", 99_999)


def test_shards_must_have_a_batch_a_validation_sample_and_a_held_out_passage(data_chain: DataChain) -> None:
    spec = recipe("smoke")
    require_enough_samples(spec, data_chain.shards)
    batch = {"optimizer.global_batch_sequences": 1 << 20}
    with pytest.raises(
        InputError, match=r"the train split holds [\d,]+ samples of 70 tokens, but a step takes .*1048576"
    ):
        require_enough_samples(spec.with_settings(batch), data_chain.shards)
    counts = dict(data_chain.shards.counts) | {"num_shards": 0}
    with pytest.raises(InputError, match="the train split is too small"):
        require_enough_samples(spec, data_chain.shards.model_copy(update={"counts": counts}))


def test_a_shard_of_another_size_is_refused(data_chain: DataChain, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("copy")
    for file in data_chain.shards.path.glob("*-*"):
        (folder / file.name).write_bytes(file.read_bytes())
    tokens = folder / tokens_name("train", 1)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    copied: TokenShards = data_chain.shards.model_copy(update={"path": folder})
    with pytest.raises(DigestMismatch, match=r"train-00001\.bin"):
        train(data_chain._replace(shards=copied))


def batches(count: int, *, then: Exception | None = None) -> Iterator[Batch]:
    for number in range(count):
        yield Batch(np.array([number]), np.zeros(1), np.zeros((1, 2)), np.zeros((1, 2)))
    if then:
        raise then


def test_prefetched_batches_come_in_order_and_end() -> None:
    with Prefetched(batches(20), depth=3) as prepared:
        assert [int(batch.sample_ids[0]) for batch in prepared] == list(range(20))
        assert next(prepared, None) is None


def test_an_error_in_the_thread_is_raised_in_place_of_its_batch() -> None:
    prepared = Prefetched(batches(2, then=OSError("disk gone")), depth=8)
    next(prepared)
    next(prepared)
    with pytest.raises(OSError, match="disk gone"):
        next(prepared)


def test_no_more_batches_are_prepared_than_asked_for_and_closing_ends_the_thread() -> None:
    taken = []

    def endless() -> Iterator[Batch]:
        while True:
            taken.append(1)
            yield Batch(*(np.zeros(1),) * 4)

    with Prefetched(endless(), depth=4) as prepared:
        next(prepared)
        deadline = time.monotonic() + 60
        while len(taken) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # in which it would take more
        assert len(taken) == 5
    assert not prepared._thread.is_alive()


def test_waiting_time_is_measured() -> None:
    def slow() -> Iterator[Batch]:
        time.sleep(0.2)
        yield from batches(1)

    with Prefetched(slow(), depth=1) as prepared:
        next(prepared)
        assert prepared.waited_seconds > 0.1
