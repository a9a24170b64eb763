"""Batches of pairs: what is in them, in which order, and that they depend on nothing but their position."""

from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from t5train.data.pairs.pair_samples import PairSamples
from t5train.data.samples.loader import Batch, Prefetched, Segments
from t5train.data.samples.mixture import BLOCK
from t5train.errors import DigestMismatch, InputError
from t5train.records.stage_records import PairShards
from t5train.spec import PairsSpec
from tests.support.made_pairs import IdsOfPair, made_pair_shards

ROW = (20, 12)
SPEC = PairsSpec(input_tokens=ROW[0], target_tokens=ROW[1])
KEYED = ("inputs", "targets", "input_keys", "target_keys")


def some_pairs(number: int, seed: int) -> list[IdsOfPair]:
    generator = np.random.default_rng(seed)
    lengths = [generator.integers(1, tokens, number) for tokens in ROW]
    return [
        tuple([*generator.integers(2, 400, size).tolist(), 1] for size in sizes) for sizes in zip(*lengths, strict=True)
    ]


TASKS = [
    {"train": some_pairs(70, 1), "validation": some_pairs(9, 2)},
    {"train": some_pairs(30, 3), "validation": some_pairs(6, 4)},
]


@pytest.fixture(scope="module", params=[1, 2])
def tasks(request: pytest.FixtureRequest) -> list[dict[str, list[IdsOfPair]]]:
    return TASKS[: request.param]


@pytest.fixture(scope="module")
def shards(tasks: list[dict[str, list[IdsOfPair]]], tmp_path_factory: pytest.TempPathFactory) -> PairShards:
    return made_pair_shards(tmp_path_factory.mktemp("shards") / "made", tasks, ROW)


def parts(batch: Batch) -> list[np.ndarray]:
    """All arrays of a batch."""
    assert batch.segments is not None
    return [each for each in (*batch, *batch.segments) if isinstance(each, np.ndarray)]


def segments_of(batch: Batch) -> Segments:
    assert batch.segments is not None
    return batch.segments


def pairs_in(batch: Batch) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield ids, and keys if there are some, of the sources and targets in a batch."""
    segments = segments_of(batch)
    sides = [
        (segments.inputs, batch.inputs, segments.input_keys),
        (segments.targets, batch.targets, segments.target_keys),
    ]
    for row in range(len(batch.inputs)):
        for segment in range(1, segments.inputs[row].max() + 1):
            found = [
                values[row, of_side[row] == segment]
                for of_side, *some in sides
                for values in some
                if values is not None
            ]
            yield tuple(tuple(each.tolist()) for each in found)


def test_packed_rows_are_those_of_seqio(tmp_path: Path) -> None:
    """The example of EncDecFeatureConverter, whose two pairs fill one row of 10 and 7 tokens."""
    pairs = [([7, 8, 5, 1], [3, 9, 1]), ([8, 4, 9, 3, 1], [4, 1])]
    shards = made_pair_shards(tmp_path / "seqio", [{"train": pairs}], (10, 7))
    batch = PairSamples(shards, "train", PairsSpec(), 0).batch(0, 1)
    segments, targets = segments_of(batch), batch.targets[0].tolist()
    if targets[0] == 4:  # which pair comes first depends on the seed
        pairs.reverse()
    flat = [[token for pair in pairs for token in pair[side]] for side in (0, 1)]
    of_pairs = [[number for number, pair in enumerate(pairs, 1) for _ in pair[side]] for side in (0, 1)]
    assert batch.inputs.tolist() == [[*flat[0], 0]]
    assert targets == [*flat[1], 0, 0]
    assert segments.inputs.tolist() == [[*of_pairs[0], 0]]
    assert segments.targets.tolist() == [[*of_pairs[1], 0, 0]]
    assert segments.global_targets == 5
    starts = np.diff(segments.targets[0], prepend=0) != 0
    shifted = np.where(starts | (segments.targets[0] == 0), 0, [0, *targets[:-1]])
    assert shifted.tolist() == ([0, 3, 9, 0, 4, 0, 0] if pairs[0][1][0] == 3 else [0, 4, 0, 3, 9, 0, 0])


def test_an_epoch_has_every_pair_once_and_each_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    shards = made_pair_shards(tmp_path / "one", TASKS[:1], ROW)
    samples = PairSamples(shards, "train", SPEC, 5)
    rows = samples.num_samples
    assert rows < 60
    wanted = Counter((tuple(source), tuple(target)) for source, target in TASKS[0]["train"])
    epochs = [samples.batch(epoch * rows, rows) for epoch in (0, 1)]
    for number, batch in enumerate(epochs):
        assert Counter(pairs_in(batch)) == wanted
        assert (batch.epochs == number).all()
    assert epochs[0].sample_ids.tolist() != epochs[1].sample_ids.tolist()
    assert PairSamples(shards, "train", SPEC, 6).batch(0, rows).sample_ids.tolist() != epochs[0].sample_ids.tolist()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**40), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_batch_is_the_same_whatever_ranks_and_passes_it_is_divided_among(
    shards: PairShards, start: int, sizes: list[int]
) -> None:
    whole = PairSamples(shards, "train", SPEC, 5, dropout=True).batch(start, sum(sizes))
    assert whole.inputs.shape == (sum(sizes), ROW[0])
    assert whole.targets.shape == (sum(sizes), ROW[1])
    samples, firsts = PairSamples(shards, "train", SPEC, 5, dropout=True), np.cumsum(sizes) - sizes
    shares = [samples.batch(start + int(first), size) for first, size in zip(firsts, sizes, strict=True)]
    for one, several in zip(parts(whole), zip(*map(parts, shares), strict=True), strict=True):
        assert (one == np.concatenate(several)).all()
    assert sum(segments_of(share).global_targets for share in shares) == segments_of(whole).global_targets


@pytest.mark.parametrize("split", ["train", "validation"])
def test_target_tokens_are_counted_without_reading_them(shards: PairShards, split: str) -> None:
    samples = PairSamples(shards, split, SPEC, 5)
    for start, number in ((0, 1), (3, 50), (1000, 8)):
        batch = samples.batch(start, number)
        assert (
            samples.targets_of(start, number)
            == (segments_of(batch).targets > 0).sum()
            == segments_of(batch).global_targets
        )


def test_the_task_of_a_sample_is_that_of_its_pairs(shards: PairShards, tasks: list[dict[str, list[IdsOfPair]]]) -> None:
    for split in ("train", "validation"):
        samples = PairSamples(shards, split, SPEC, 5)
        batch = samples.batch(0, 40)
        for place, task in enumerate(samples.task_of(batch.sample_ids)):
            one = Batch(
                *(each[[place]] for each in batch[:4]),
                Segments(*(each[[place]] for each in batch.segments[:2]), None, None, 0),
            )
            of_task = {(tuple(source), tuple(target)) for source, target in tasks[task][split]}
            assert set(pairs_in(one)) <= of_task


def test_held_out_pairs_are_not_packed_and_no_wider_than_the_longest(
    shards: PairShards, tasks: list[dict[str, list[IdsOfPair]]]
) -> None:
    samples = PairSamples(shards, "validation", SPEC, 5)
    wanted = [(tuple(source), tuple(target)) for task in tasks for source, target in task["validation"]]
    assert samples.num_samples == len(wanted)
    batch = samples.batch(0, len(wanted))
    assert Counter(pairs_in(batch)) == Counter(wanted)
    assert batch.inputs.shape[1] == max(len(source) for source, _ in wanted)
    assert batch.targets.shape[1] == max(len(target) for _, target in wanted)
    again = PairSamples(shards, "validation", SPEC, 6).batch(len(wanted), len(wanted))
    assert all((one == other).all() for one, other in zip(parts(batch), parts(again), strict=True)), (
        "the same for all seeds"
    )
    assert not batch.epochs.any()


def test_shuffled_targets_get_the_source_of_the_next_sample(shards: PairShards) -> None:
    samples = PairSamples(shards, "validation", SPEC, 5)
    number = samples.num_samples
    plain = list(pairs_in(samples.batch(0, number)))
    shuffled = samples.batch(2, 4, shuffled=True)
    assert [source for source, _ in pairs_in(shuffled)] == [source for source, _ in plain[3:7]]
    assert [target for _, target in pairs_in(shuffled)] == [target for _, target in plain[2:6]]
    last = samples.batch(number - 1, 1, shuffled=True)
    assert list(pairs_in(last)) == [(plain[0][0], plain[-1][1])]


@pytest.fixture(scope="module")
def packed_and_not(tmp_path_factory: pytest.TempPathFactory) -> list[PairShards]:
    folder = tmp_path_factory.mktemp("both")
    return [made_pair_shards(folder / str(pack), TASKS, ROW, pack=pack) for pack in (True, False)]


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])  # a smaller seed takes minutes to find
@given(st.integers(0, 2**31))
@example(3834)  # after three times as many rows as there are, the second task is not through its second epoch
def test_a_pair_has_the_same_keys_in_an_epoch_packed_or_not(packed_and_not: list[PairShards], seed: int) -> None:
    found = []
    for shards in packed_and_not:
        samples = PairSamples(shards, "train", SPEC, seed, dropout=True)
        batches = [samples.batch(position, 1) for position in range(4 * samples.num_samples)]
        assert all(batch.inputs.shape == (1, ROW[0]) for batch in batches)
        found.append(
            {(int(batch.epochs[0]), pair) for batch in batches for pair in pairs_in(batch) if batch.epochs[0] < 2}
        )
    assert found[0] == found[1]
    assert len({pair for _, pair in found[0]}) == 2 * 100, "all pairs in each of two epochs, with keys of their own"


def test_keys_are_those_of_seed_epoch_pair_and_place(tmp_path: Path) -> None:
    pair = ([5, 5, 5, 1], [5, 5, 5, 1])
    shards = made_pair_shards(tmp_path / "keys", [{"train": [pair] * 8}, {"train": [pair] * 8}], ROW)
    keys = Counter[int]()
    for seed in (0, 1):
        batch = PairSamples(shards, "train", SPEC, seed, dropout=True).batch(0, 12)
        segments = segments_of(batch)
        assert segments.input_keys is not None
        assert segments.target_keys is not None
        assert segments.input_keys.dtype == np.int64
        assert not segments.input_keys[segments.inputs == 0].any()
        for of_side, some in ((segments.inputs, segments.input_keys), (segments.targets, segments.target_keys)):
            keys.update(some[of_side > 0].tolist())
    assert keys.most_common(1)[0][1] == 1, "of different tokens"
    plain = segments_of(PairSamples(shards, "train", SPEC, 0).batch(0, 12))
    assert (plain.input_keys, plain.target_keys) == (None, None)


def test_tasks_are_trained_on_in_proportion_to_their_pairs_not_to_their_rows(tmp_path: Path) -> None:
    short, long = [([5, 1], [5, 1])] * 600, [([5] * 19 + [1], [5] * 11 + [1])] * 600
    shards = made_pair_shards(tmp_path / "rates", [{"train": short}, {"train": long}], ROW)
    two = PairsSpec(train=("a.jsonl#source=a&target=b&task=a", "b.jsonl#source=a&target=b&task=b"))
    for spec, share in ((two, 0.5), (two.model_copy(update={"mixing_weights": (1, 3)}), 0.25)):
        samples = PairSamples(shards, "train", spec, 0)
        batch = samples.batch(0, BLOCK)
        tasks, pairs = samples.task_of(batch.sample_ids), segments_of(batch).inputs.max(axis=1)
        assert pairs[tasks == 0].sum() / pairs.sum() == pytest.approx(share, abs=0.01)


def test_batches_can_be_prepared_in_advance(shards: PairShards) -> None:
    samples = PairSamples(shards, "train", SPEC, 5)
    with Prefetched((samples.batch(start, 4) for start in count(0, 4)), 2) as batches:
        for number, batch in enumerate(islice(batches, 3)):
            assert all(
                (one == other).all()
                for one, other in zip(parts(batch), parts(samples.batch(4 * number, 4)), strict=True)
            )


def test_a_split_without_pairs_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    shards = made_pair_shards(tmp_path / "damaged", TASKS, ROW)
    with pytest.raises(InputError, match=r"the test split has no pairs.*pairs\.split"):
        PairSamples(shards, "test", SPEC, 0)
    path = shards.path / "train-00001.lengths"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DigestMismatch, match=r"train-00001\.lengths is damaged: it has 232 bytes, but 240"):
        PairSamples(shards, "train", SPEC, 0)


def test_the_longest_target_is_that_of_any_task(shards: PairShards, tasks: list[dict[str, list[IdsOfPair]]]) -> None:
    longest = max(len(target) for task in tasks for _, target in task["train"])
    assert PairSamples(shards, "train", SPEC, 1).longest_target == longest
