"""Groups of equal keys are those of a plain search, however many keys are sorted at a time."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from t5train.data.checks import equal_groups
from t5train.data.checks.equal_groups import equal_pairs, join_groups, ungrouped

PAIRS = st.integers(1, 30).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=40))
)


@given(PAIRS)
def test_passages_that_pairs_connect_are_one_group(given_pairs: tuple[int, list[tuple[int, int]]]) -> None:
    count, pairs = given_pairs
    groups = [{number} for number in range(count)]
    for one, other in pairs:
        joined = groups[one] | groups[other]
        for member in joined:
            groups[member] = joined
    found = ungrouped(count)
    for half in (pairs[::2], pairs[1::2]):
        join_groups(found, np.array(half, np.int64).reshape(-1, 2))
    assert found.tolist() == [min(group) for group in groups]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=9), min_size=1, max_size=4))
@pytest.mark.parametrize("most", [3, 1000])
def test_passages_with_equal_keys_are_connected(
    monkeypatch: pytest.MonkeyPatch, most: int, parts: list[list[tuple[int, int]]]
) -> None:
    monkeypatch.setattr(equal_groups, "MOST_KEYS", most)
    every = [key for part in parts for key in part]
    arrays = [np.array(part, np.uint64).reshape(-1, 2) for part in parts]
    pairs = np.concatenate(list(equal_pairs(lambda: ((each[:, 0], each[:, 1]) for each in arrays), len(every))))
    expected = [every.index(key) if key[0] else number for number, key in enumerate(every)]
    found = ungrouped(len(every))
    join_groups(found, pairs)
    assert found.tolist() == expected
    assert (pairs[:, 0] < pairs[:, 1]).all()
    assert len(pairs) == len(every) - len(set(expected))
