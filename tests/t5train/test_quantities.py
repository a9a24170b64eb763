"""Numbers and sizes as users read them."""

import pytest

from t5train.quantities import format_bytes, quantity


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MB"), (40_000_000, "40.0 MB"), (10**9 - 10**5, "999.9 MB"), (1_300_000_000, "1.3 GB")]
)
def test_sizes_are_shown_in_decimal_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_count_of_one_has_its_noun_in_the_singular() -> None:
    assert [quantity(number, "file") for number in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]
