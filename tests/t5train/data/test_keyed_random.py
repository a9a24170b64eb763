"""Random bits by key and counter."""

import numpy as np

from t5train.data.keyed_random import bits, keys, permutation


def test_the_bits_of_a_key_never_change() -> None:
    assert [int(value) for value in bits(keys(1, 2), 2)[0]] == [16613338946343043936, 5167718485781182436]


def test_keys_differ_in_every_part_and_in_their_order() -> None:
    found = [int(keys(*parts)[0]) for parts in [(0,), (0, 0), (0, 1), (1, 0), (1, 1), (2**31 - 1, 7), (7, 2**31 - 1)]]
    assert len(set(found)) == len(found)


def test_keys_of_an_array_are_those_of_its_elements() -> None:
    assert (keys(5, np.arange(4)) == np.concatenate([keys(5, element) for element in range(4)])).all()


def test_bits_are_balanced_and_uncorrelated_between_neighbouring_keys() -> None:
    drawn = bits(keys(0, np.arange(4096)), 16)
    ones = np.unpackbits(drawn.view(np.uint8)).reshape(4096, 16 * 64).astype(np.float64)
    assert np.abs(ones.mean(axis=0) - 0.5).max() < 0.05
    assert abs(np.corrcoef(ones[:-1].ravel(), ones[1:].ravel())[0, 1]) < 0.005


def test_a_permutation_holds_everything_once_and_depends_on_every_part() -> None:
    first = permutation(1000, 1, 2)
    assert sorted(first) == list(range(1000))
    assert (first == permutation(1000, 1, 2)).all()
    assert (first != permutation(1000, 1, 3)).any()
    assert (first != permutation(1000, 2, 2)).any()
