"""Random bits from a key and a counter."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.samples.keyed_random import bits, keys, permuted

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**31 - 1)


def whole(size: int, *parts: int) -> np.ndarray:
    return permuted(np.arange(size), size, *parts)


def excess(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square of the counts is above that of equal chances."""
    expected, freedom = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_the_bits_of_a_key_never_change() -> None:
    assert [int(value) for value in bits(keys(1, 2), 2)[0]] == [16613338946343043936, 5167718485781182436]


def test_keys_differ_in_every_part_and_in_their_order_and_those_of_an_array_are_of_its_elements() -> None:
    found = [int(keys(*parts)[0]) for parts in [(0,), (0, 0), (0, 1), (1, 0), (1, 1), (2**31 - 1, 7), (7, 2**31 - 1)]]
    assert len(set(found)) == len(found)
    assert (keys(5, np.arange(4)) == np.concatenate([keys(5, element) for element in range(4)])).all()


def test_bits_are_balanced_and_uncorrelated_between_neighbouring_keys() -> None:
    drawn = bits(keys(0, np.arange(4096)), 16)
    ones = np.unpackbits(drawn.view(np.uint8)).reshape(4096, 16 * 64).astype(np.float64)
    assert np.abs(ones.mean(axis=0) - 0.5).max() < 0.05
    assert abs(np.corrcoef(ones[:-1].ravel(), ones[1:].ravel())[0, 1]) < 0.005


def test_a_permutation_never_changes() -> None:
    assert whole(10, 1, 2).tolist() == [4, 9, 6, 5, 8, 1, 2, 7, 0, 3]
    assert permuted(np.array([0, 19_999_999]), 20_000_000, 1, 2).tolist() == [1159990, 15997942]


@given(SIZES, SEEDS, st.integers(0, 1000))
def test_a_permutation_has_every_element_once(size: int, seed: int, epoch: int) -> None:
    assert np.bincount(whole(size, seed, epoch), minlength=size).tolist() == [1] * size


@given(st.integers(20, 3000), SEEDS, st.integers(0, 1000))
def test_a_permutation_depends_on_every_part(size: int, seed: int, epoch: int) -> None:
    order = whole(size, seed, epoch)
    for other in (whole(size, seed, epoch + 1), whole(size, seed + 1, epoch), whole(size, epoch, seed + 1)):
        assert (order != other).any()


@given(st.integers(1, 2**60), st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 99)), max_size=30), SEEDS)
def test_positions_are_permuted_alike_one_by_one_and_all_at_once(
    size: int, drawn: list[tuple[int, int]], seed: int
) -> None:
    positions = np.array([position % size for position, _ in drawn], dtype=np.int64)
    epochs = np.array([epoch for _, epoch in drawn], dtype=np.int64)
    together = permuted(positions, size, seed, epochs).tolist()
    assert together == [
        int(permuted(position[np.newaxis], size, seed, int(epoch))[0])
        for position, epoch in zip(positions, epochs, strict=True)
    ]
    assert all(0 <= found < size for found in together)


@pytest.mark.parametrize("size", [2, 3, 7, 16, 17, 100, 1000])
def test_every_element_is_equally_likely_at_every_position(size: int) -> None:
    draws, positions = 20_000, np.arange(min(size, 10))
    found = permuted(np.tile(positions, draws), size, 7, np.repeat(np.arange(draws), len(positions))).reshape(draws, -1)
    assert max(excess(np.bincount(column, minlength=size)) for column in found.T) < 5
    pairs = np.bincount(found[:, 0] * size + found[:, 1], minlength=size * size).reshape(size, size)
    assert not pairs.diagonal().any()
    if size < 20:
        assert excess(pairs[~np.eye(size, dtype=bool)]) < 5


def test_neighbours_in_a_large_order_are_uncorrelated() -> None:
    order = whole(300_000, 0, 0)
    steps = np.abs(np.diff(order))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < 0.01
    assert (steps == 1).sum() < 12  # two are expected
    assert abs(np.corrcoef(order, whole(300_000, 0, 1))[0, 1]) < 0.01
    assert excess(np.bincount(order[:30_000] // 1000, minlength=300)) < 5


def test_permuting_takes_memory_only_for_the_requested_positions() -> None:
    positions = np.arange(128)
    tracemalloc.start()
    try:
        permuted(positions, 20_000_000, 1, 2, np.zeros_like(positions))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1000 * len(positions)
