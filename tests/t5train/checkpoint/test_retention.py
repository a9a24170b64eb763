"""The newest checkpoint is always kept; others are kept as the settings and the disk space allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.checkpoint.retention import kept, most_held

STEPS = dict.fromkeys((4, 8, 12, 16, 20), 10)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"keep_last": 1}, {20}),
        ({"keep_last": 9}, {4, 8, 12, 16, 20}),
        ({"keep_last": 2, "keep_every": 8}, {20, 16, 8}),
        ({"keep_last": 3, "most_bytes": 40}, {20, 16, 12}),
        ({"keep_last": 3, "most_bytes": 39}, {20, 16}),
        ({"keep_last": 2, "keep_every": 8, "most_bytes": 30}, {20, 16}),
        ({"keep_last": 3, "most_bytes": 1}, {20}),
    ],
)
def test_the_settings_decide_which_checkpoints_are_kept(settings: dict[str, int], steps: set[int]) -> None:
    assert kept(STEPS, **settings) == steps


@given(
    sizes=st.dictionaries(st.integers(0, 99), st.integers(0, 99)),
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 9),
    most_bytes=st.none() | st.integers(1, 500),
)
def test_the_newest_is_kept_and_older_ones_only_if_another_checkpoint_still_fits(
    sizes: dict[int, int], keep_last: int, keep_every: int | None, most_bytes: int | None
) -> None:
    found = kept(sizes, keep_last, keep_every, most_bytes)
    assert found <= sizes.keys()
    if sizes:
        assert max(sizes) in found
    if most_bytes is not None and len(found) > 1:
        assert sum(sizes[step] for step in found) + sizes[max(found)] <= most_bytes


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"keep_last": 1}, {20, 8}),
        ({"keep_last": 2}, {20, 16, 8}),
        ({"keep_last": 4}, {20, 16, 12, 8, 4}),  # the best as of step 8 is 8, and as of step 12 it was 4
        ({"keep_last": 3, "most_bytes": 40}, {20, 16, 8}),
        ({"keep_last": 3, "most_bytes": 1}, {20, 8}),
    ],
)
def test_each_checkpoint_is_kept_with_the_best_one_as_of_its_step(settings: dict[str, int], steps: set[int]) -> None:
    assert kept(STEPS, **settings, bests={4: 4, 8: 8, 12: 4, 16: 8, 20: 8}) == steps
    assert kept({20: 10, 16: 10}, 1, bests={16: 8, 20: 8}) == {20}  # step 8 is lost


@given(
    num_steps=st.integers(1, 60),
    save_every=st.integers(1, 20),
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 20),
)
def test_the_computed_maximum_of_checkpoints_equals_that_of_a_simulated_run(
    num_steps: int, save_every: int, keep_last: int, keep_every: int | None
) -> None:
    held, most = set[int](), 0
    for step in range(1, num_steps + 1):
        if step % save_every == 0 or step == num_steps:
            held.add(step)
            most = max(most, len(held))
            held = kept(dict.fromkeys(held, 1), keep_last, keep_every)
    assert most_held(num_steps, save_every, keep_last, keep_every) == most
