"""Canonical JSON: one text for one value."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.records.identity import canonical_json, fingerprint

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


def same(left: Any, right: Any) -> bool:
    """Equality that distinguishes True from 1, 1 from 1.0 and 0.0 from -0.0, as JSON does."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


@given(VALUES, VALUES)
def test_canonical_texts_are_equal_exactly_when_values_are(left: Any, right: Any) -> None:
    assert (canonical_json(left) == canonical_json(right)) == same(left, right)


@given(VALUES)
def test_the_text_reads_back_as_the_value(value: Any) -> None:
    assert same(json.loads(canonical_json(value)), value)


@given(st.dictionaries(st.text(), SCALARS, min_size=2), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


def test_a_fingerprint_is_the_same_on_every_machine() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"ü": "\n"}}
    assert canonical_json(value) == '{"a":{"ü":"\\n"},"b":[1,2.5,null,true]}'
    assert fingerprint(value) == "db415f235ebd8b941b572b7aed7994042b58f8ed3d916d445ae54b690a41003c"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_path(number: float) -> None:
    with pytest.raises(ValueError, match=r"value\.rates\[1\] is .*(nan|inf)"):
        canonical_json({"rates": [1.0, number]})


@pytest.mark.parametrize("value", [{1}, frozenset(), b"x", bytearray(), object(), 1j])
def test_a_value_without_a_canonical_form_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"value\.a\[0\] is a \w+: it has no canonical JSON form"):
        canonical_json({"a": [value]})


@pytest.mark.parametrize("key", [1, None, 2.5, True, (1, 2)])
def test_a_key_that_is_not_text_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="keys must be strings"):
        canonical_json({key: 1})
