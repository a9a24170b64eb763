"""Tables and sections that commands write into pages of the documentation."""

from pathlib import Path

import pytest

from tests.acceptance import fault_table, resume_table
from tests.acceptance.operation import operation_kills
from tests.acceptance.result_table import write_section, write_table


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


def test_only_the_table_with_the_header_is_replaced(tmp_path: Path) -> None:
    document, header = tmp_path / "document.md", "| a | b |\n|---|---|\n"
    text = "| other |\n|---|\n| 1 |\n\n{}\nEnd\n"
    document.write_text(text.format(header + "| 1 | 2 |\n| 3 | 4 |\n"), "utf-8")
    write_table(document, header, ["| 5 | 6 |"])
    assert document.read_text("utf-8") == text.format(header + "| 5 | 6 |\n")
    with pytest.raises(ValueError, match="no table"):
        write_table(document, "| c |\n|---|\n", [])


@pytest.mark.parametrize(
    ("page", "header"),
    [("faults", fault_table._HEADER), ("resumes", resume_table._HEADER), ("operation-faults", operation_kills._HEADER)],
)
def test_the_pages_have_the_tables_that_are_written(page: str, header: str) -> None:
    assert (Path(__file__).parents[2] / f"docs/evidence/{page}.md").read_text("utf-8").count(header) == 1
