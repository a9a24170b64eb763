"""The table that compares layouts: the text of a cell, and where the table is put."""

from pathlib import Path

import numpy as np
import pytest

from tests.acceptance.layout_equality import (
    BEGIN,
    CONDITIONS,
    END,
    LAYOUTS,
    Difference,
    Trained,
    put_into,
    spec_of,
    table,
)


def _trained(nudge: float) -> Trained:
    weights = {"a": np.full(4, 2.0, np.float32), "b": np.array([1.0, 1.0 + nudge], np.float32)}
    return Trained(weights, np.array([5.0, 4.0]), np.array([1.0, 2.0 + nudge]))


def test_a_difference_is_the_largest_of_any_element() -> None:
    found = Difference.between(_trained(0.5), _trained(0.0))
    assert (found.weights, found.losses, found.norms) == (0.5, 0.0, 0.25)


def test_bit_equal_is_said_of_equal_weights_and_losses_alone() -> None:
    cells = {(layout, condition): Difference(0.0, 0.0, 1e-6) for layout in LAYOUTS for condition in CONDITIONS}
    cells["ZeRO 2", "four passes"] = Difference(1e-5, 2e-8, 1e-6)
    cells["ZeRO 3", "four passes"] = Difference(0.0, 2e-8, 1e-6)
    lines = table(cells, ranks=2).splitlines()
    assert "| ZeRO 1 | bit-equal | bit-equal | bit-equal |" in lines
    assert "| ZeRO 2 | bit-equal | bit-equal | 1e-05 (2e-08) |" in lines
    assert "| ZeRO 3 | bit-equal | bit-equal | bit-equal (2e-08) |" in lines


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_differ_in_nothing_that_decides_what_is_trained(layout: str, condition: str) -> None:
    assert spec_of(layout, condition, 4, 50).fingerprint() == spec_of("ZeRO 0", condition, 2, 50).fingerprint()


def test_tables_are_put_between_their_lines_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    put_into(path, "new")
    assert path.read_text() == f"above\n{BEGIN}\nnew\n{END}\nbelow\n"
    path.write_text("nothing to replace")
    with pytest.raises(SystemExit, match="lacks a line"):
        put_into(path, "new")
    assert path.read_text() == "nothing to replace"
