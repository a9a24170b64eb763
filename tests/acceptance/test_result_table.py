"""Sections that commands write into pages of the documentation."""

from pathlib import Path

import pytest

from tests.acceptance.result_table import write_section


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_section_is_appended_once_and_then_replaced(tmp_path: Path, rounds: int) -> None:
    document = tmp_path / "document.md"
    document.write_text("# Title\n", "utf-8")
    for number in range(rounds):
        write_section(document, "smoke", f"text {number}")
        write_section(document, "base", "other")
    text = document.read_text("utf-8")
    assert text.count("<!-- made by smoke -->\n") == text.count("<!-- end of what smoke made -->") == 1
    assert f"text {rounds - 1}\n" in text
    assert "# Title\n" in text
    assert text.count("other") == 1
