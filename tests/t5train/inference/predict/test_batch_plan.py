"""Batches hold every row once, those of similar length together, within the tokens and sequences that are allowed."""

import numpy as np
import pytest

from t5train.inference.predict.batch_plan import MOST_PARTS, BatchLimits, batch_plan

LENGTHS = np.random.default_rng(0).integers(1, 200, 1000)


@pytest.mark.parametrize(("num_beams", "max_new_tokens"), [(1, 500), (4, 10)])
def test_each_row_is_in_one_batch_of_one_part_and_no_batch_is_too_large(num_beams: int, max_new_tokens: int) -> None:
    plan = batch_plan(LENGTHS, BatchLimits(2000, 48, num_beams, max_new_tokens))
    batches = [plan.rows_of(batch) for part in range(plan.num_parts) for batch in plan.batches_of(part)]
    assert sorted(np.concatenate(batches)) == list(range(len(LENGTHS)))
    assert sum(map(plan.rows_in, range(plan.num_parts))) == len(LENGTHS)
    for rows in batches:
        tokens = len(rows) * num_beams * (LENGTHS[rows].max() + max_new_tokens)
        assert len(rows) == 1 or (tokens <= 2000 and len(rows) * num_beams <= 48)


def test_a_batch_is_a_part_unless_there_would_be_too_many() -> None:
    few = batch_plan(LENGTHS, BatchLimits(2000, 48, 1, 10))
    assert few.num_parts == len(few.starts) - 1
    many = batch_plan(np.full(2 * MOST_PARTS - 1, 5), BatchLimits(1, 1, 1, 10))
    assert many.num_parts == MOST_PARTS
    assert many.rows_in(0) == 2
    assert many.rows_in(MOST_PARTS - 1) == 1


def test_padding_is_hardly_any() -> None:
    plan = batch_plan(LENGTHS, BatchLimits(4000, 64, 1, 50))
    padded = sum(len(rows) * LENGTHS[rows].max() for rows in map(plan.rows_of, range(len(plan.starts) - 1)))
    assert LENGTHS.sum() / padded > 0.95


def test_rows_of_equal_length_keep_their_order() -> None:
    plan = batch_plan(np.array([3, 5, 3, 3]), BatchLimits(1, 64, 1, 50))
    assert plan.order.tolist() == [1, 0, 2, 3]
    assert len(plan.starts) == 5
