"""A table on a page of the documentation, to which a command adds a row as soon as it has a result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from t5train.files.atomic import write_text


@dataclass(frozen=True)
class ResultTable:
    """The last thing on a page. The first cell of a row is its name, the last its result."""

    page: Path
    columns: Sequence[str]

    def rows(self) -> dict[str, list[str]]:
        """Return the cells of each row, by name."""
        _, _, rows = self.page.read_text("utf-8").partition(self._header)
        cells = [line.strip("|").split("|") for line in rows.splitlines() if line.startswith("|")]
        return {row[0].strip(): [cell.strip() for cell in row] for row in cells}

    def add(self, row: Sequence[str]) -> None:
        """Add a row, or replace the one of its name."""
        rows = self.rows() | {row[0]: list(row)}
        above, header, _ = self.page.read_text("utf-8").partition(self._header)
        write_text(self.page, above + header + "".join(f"| {' | '.join(cells)} |\n" for cells in rows.values()))

    @property
    def _header(self) -> str:
        return f"| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}\n"
