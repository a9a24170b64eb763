"""The table that compares layouts: the text of a cell."""

import numpy as np
import pytest

from tests.acceptance.layout_equality import CONDITIONS, LAYOUTS, Difference, Trained, spec_of, table


def _trained(nudge: float) -> Trained:
    weights = {"a": np.full(4, 2.0, np.float32), "b": np.array([1.0, 1.0 + nudge], np.float32)}
    return Trained(weights, np.array([5.0, 4.0]), np.array([1.0, 2.0 + nudge]))


def test_a_difference_is_the_largest_of_any_element() -> None:
    found = Difference.between(_trained(0.5), _trained(0.0))
    assert (found.weights, found.losses, found.norms) == (0.5, 0.0, 0.25)


def test_a_cell_says_bit_equal_for_equal_weights_and_adds_different_losses() -> None:
    cells = {(layout, condition): Difference(0.0, 0.0, 1e-6) for layout in LAYOUTS for condition in CONDITIONS}
    cells["ZeRO 2", "four passes"] = Difference(1e-5, 2e-8, 1e-6)
    cells["ZeRO 3", "four passes"] = Difference(0.0, 2e-8, 1e-6)
    lines = table(cells, ranks=2).splitlines()
    assert "| ZeRO 1 | bit-equal | bit-equal | bit-equal |" in lines
    assert "| ZeRO 2 | bit-equal | bit-equal | 1e-05 (2e-08) |" in lines
    assert "| ZeRO 3 | bit-equal | bit-equal | bit-equal (2e-08) |" in lines


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_have_the_same_fingerprint(layout: str, condition: str) -> None:
    assert spec_of(layout, condition, 4, 50).fingerprint() == spec_of("ZeRO 0", condition, 2, 50).fingerprint()
