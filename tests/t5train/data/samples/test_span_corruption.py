"""T5's span corruption: its counts, its distribution, its inverse."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.samples import keyed_random
from t5train.data.samples.span_corruption import Geometry, corrupt, geometry
from t5train.errors import SpecError
from t5train.spec import ObjectiveSpec

EOS, FIRST_SENTINEL = 1, 1099
OBJECTIVES = st.builds(
    ObjectiveSpec,
    noise_density=st.floats(0.05, 0.45),
    mean_span_tokens=st.floats(1.5, 8),
    input_tokens=st.integers(16, 200),
)


def windows_of(count: int, shape: Geometry) -> np.ndarray:
    """Windows whose neighbouring tokens differ, so that each token can be traced."""
    return (np.arange(count * shape.window_tokens) % 900 + 2).reshape(count, -1).astype(np.uint16)


def restore(inputs: np.ndarray, targets: np.ndarray, spans: int) -> list[int]:
    """The original window of a sample: in the input, each sentinel is replaced by what follows it in the target."""
    assert inputs[-1] == targets[-1] == EOS
    sentinels = [FIRST_SENTINEL - span for span in range(spans)]
    ends = [list(targets).index(sentinel) for sentinel in sentinels] + [len(targets) - 1]
    noise = {sentinel: targets[ends[i] + 1 : ends[i + 1]] for i, sentinel in enumerate(sentinels)}
    assert all(len(span) for span in noise.values())
    return [int(token) for each in inputs[:-1] for token in noise.get(int(each), [each])]


def test_the_lengths_are_those_of_the_paper() -> None:
    objective = ObjectiveSpec(noise_density=0.15, mean_span_tokens=3.0, input_tokens=512)
    assert (geometry(objective).window_tokens, geometry(objective).target_tokens) == (568, 114)
    assert geometry(objective) == Geometry(window_tokens=568, noise_tokens=85, spans=28)


@given(OBJECTIVES)
def test_the_window_is_the_longest_that_fits(objective: ObjectiveSpec) -> None:
    shape = geometry(objective)
    assert shape.input_tokens == objective.input_tokens
    longer = shape.window_tokens + 1
    noise = round(longer * objective.noise_density)
    spans = max(round(noise / objective.mean_span_tokens), 1)
    assert longer - noise + spans + 1 > objective.input_tokens


@given(OBJECTIVES, st.integers(0, 2**31 - 1))
def test_inputs_and_targets_together_restore_the_window(objective: ObjectiveSpec, seed: int) -> None:
    shape = geometry(objective)
    windows = windows_of(5, shape)
    inputs, targets = corrupt(windows, keyed_random.keys(seed, np.arange(5)), shape, FIRST_SENTINEL, EOS)
    assert inputs.shape == (5, shape.input_tokens)
    assert targets.shape == (5, shape.target_tokens)
    assert inputs.dtype == targets.dtype == np.int32
    for row in range(5):
        assert restore(inputs[row], targets[row], shape.spans) == windows[row].tolist()


def test_a_window_starts_unmasked_ends_masked_and_its_sentinels_count_down() -> None:
    shape = geometry(ObjectiveSpec())
    windows = windows_of(50, shape)
    inputs, targets = corrupt(windows, keyed_random.keys(3, np.arange(50)), shape, FIRST_SENTINEL, EOS)
    expected = np.arange(FIRST_SENTINEL, FIRST_SENTINEL - shape.spans, -1)
    assert (inputs[:, 0] == windows[:, 0]).all()
    assert (inputs[:, -2] == expected[-1]).all()
    assert (targets[:, 0] == FIRST_SENTINEL).all()
    assert (inputs[inputs > 1000].reshape(50, -1) == expected).all()
    assert (targets[targets > 1000].reshape(50, -1) == expected).all()


def test_a_sample_does_not_depend_on_the_rest_of_its_batch() -> None:
    shape = geometry(ObjectiveSpec(input_tokens=64))
    windows = windows_of(64, shape)
    key = keyed_random.keys(0, 0, np.arange(64))
    inputs, targets = corrupt(windows, key, shape, FIRST_SENTINEL, EOS)
    some = [40, 3, 17]
    some_inputs, some_targets = corrupt(windows[some], key[some], shape, FIRST_SENTINEL, EOS)
    assert (some_inputs == inputs[some]).all()
    assert (some_targets == targets[some]).all()


def test_every_division_into_spans_is_equally_likely() -> None:
    shape, draws = Geometry(window_tokens=11, noise_tokens=5, spans=3), 120_000
    windows = np.tile(np.arange(2, 13), (draws, 1)).astype(np.uint16)
    inputs, _ = corrupt(windows, keyed_random.keys(0, np.arange(draws)), shape, FIRST_SENTINEL, EOS)
    found = Counter(map(bytes, inputs))
    ways = len(list(combinations(range(5), 2))) * len(list(combinations(range(4), 2)))
    assert len(found) == ways == 60
    expected = draws / ways
    chi_squared = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_squared < 107.3  # 59 degrees of freedom: exceeded by chance once in 10,000 times; the key is fixed


def test_a_single_span_lies_at_the_end() -> None:
    shape = Geometry(window_tokens=9, noise_tokens=2, spans=1)
    inputs, targets = corrupt(windows_of(2, shape), keyed_random.keys(np.arange(2)), shape, FIRST_SENTINEL, EOS)
    assert inputs[0].tolist() == [2, 3, 4, 5, 6, 7, 8, FIRST_SENTINEL, EOS]
    assert targets[0].tolist() == [FIRST_SENTINEL, 9, 10, EOS]


def test_more_spans_than_sentinels_are_refused() -> None:
    with pytest.raises(SpecError, match=r"input_tokens 4096.*100 sentinels.*Raise objective\.mean_span_tokens"):
        geometry(ObjectiveSpec(input_tokens=4096))
