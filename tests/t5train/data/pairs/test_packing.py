"""Packing pairs into rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.pairs.packing import OPEN_ROWS, RowShape, best_shape, packed, row_shapes
from t5train.spec import PairsSpec

ROW = (40, 24)
LENGTHS = st.lists(st.tuples(st.integers(1, ROW[0]), st.integers(1, ROW[1])), min_size=1, max_size=400).map(np.array)


def drawn_lengths(count: int, mean: float, ratio: float = 1) -> np.ndarray:
    """Lengths as translations have them: many are short, few are long, and a long source has a long target."""
    generator = np.random.default_rng(0)
    sources = generator.lognormal(np.log(mean) - 0.32, 0.8, count)
    drawn = np.stack([sources, ratio * sources * generator.lognormal(0, 0.2, count)], axis=1)
    return np.clip(np.round(drawn), 2, 256).astype(np.int64)


@given(LENGTHS, st.integers(0, 2**63))
def test_every_pair_is_in_one_row_and_no_row_holds_more_than_fits(lengths: np.ndarray, seed: int) -> None:
    rows = packed(lengths, ROW, seed)
    assert sorted(rows.pairs.tolist()) == list(range(len(lengths)))
    assert rows.firsts[0] == 0
    assert rows.firsts[-1] == len(lengths)
    assert (np.diff(rows.firsts) > 0).all()
    assert (np.add.reduceat(lengths[rows.pairs], rows.firsts[:-1]) <= ROW).all()


@given(LENGTHS, st.integers(0, 2**63))
def test_a_row_is_opened_only_where_no_open_row_has_space(lengths: np.ndarray, seed: int) -> None:
    rows = packed(lengths, ROW, seed)
    opened = [lengths[rows.pairs[first]] for first in rows.firsts[:-1]]
    filled = np.add.reduceat(lengths[rows.pairs], rows.firsts[:-1])
    for number, pair in enumerate(opened):
        before = filled[max(0, number - OPEN_ROWS) : number]
        assert (before + pair > ROW).any(axis=1).all()


def test_the_order_of_pairs_depends_on_the_seed() -> None:
    lengths = np.full((100, 2), 8)
    assert packed(lengths, ROW, 0).pairs.tolist() != packed(lengths, ROW, 1).pairs.tolist()
    assert packed(lengths, ROW, 0).pairs.tolist() == packed(lengths, ROW, 0).pairs.tolist()


@pytest.mark.parametrize("mean", [15, 43])
def test_rows_are_nearly_full_where_sources_and_targets_are_about_as_long(mean: int) -> None:
    lengths = drawn_lengths(20_000, mean)
    rows = packed(lengths, (256, 256), 0)
    assert lengths.sum() / (512 * (len(rows.firsts) - 1)) > 0.95


def test_the_suggested_row_has_the_ratio_of_the_lengths_and_cuts_few_pairs() -> None:
    lengths = drawn_lengths(5_000, 60, 0.25)
    shapes = row_shapes(lengths, (256, 256))
    assert shapes[0][:2] == (256, 256)
    best = best_shape(shapes)
    assert 3 <= best.input_tokens / best.target_tokens <= 5
    assert best.real_share > 0.85 > shapes[0].real_share
    assert best.longer_share <= 0.01 < max(shape.longer_share for shape in shapes)
    whole = len(packed(lengths, (256, 256), 0).firsts) - 1
    assert shapes[0].real_share == pytest.approx(lengths.sum() / (512 * whole))


def test_no_row_is_suggested_that_the_settings_refuse() -> None:
    for shape in row_shapes(np.array([[2, 400]] * 50), (256, 256)):
        PairsSpec(input_tokens=shape.input_tokens, target_tokens=shape.target_tokens)


def test_of_rows_that_are_about_as_full_the_smallest_is_suggested() -> None:
    shapes = [(128, 128, 0.95, 0.0), (512, 512, 0.955, 0.0), (64, 64, 0.99, 0.2)]
    small, large, leaky = (RowShape(*shape, pairs=1) for shape in shapes)
    assert best_shape([large, small, leaky]) == small
    assert best_shape([large, leaky]) == large
    assert best_shape([leaky]) == leaky
