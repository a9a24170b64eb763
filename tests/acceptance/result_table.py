"""Results that a command records as soon as it has them: lines of JSON, and tables in pages of the documentation."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from t5train.files.atomic import write_text


@dataclass(frozen=True)
class ResultLines:
    """A file of results, one line of JSON for each. A line is on disk before ``append`` returns."""

    path: Path

    def rows(self) -> list[dict[str, Any]]:
        """Return all results, without lines that a kill cut off."""
        found = []
        for line in self._content().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Add lines, all in one write. Thread-safe."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = not self._content().endswith(b"\n")
        with open(self.path, "ab") as file:
            file.write(b"\n" * torn + b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b"\n"


@dataclass(frozen=True)
class ResultTable:
    """The last thing on a page. The first cell of a row is its name, the last its result."""

    page: Path
    columns: Sequence[str]

    def rows(self) -> dict[str, list[str]]:
        _, _, rows = self.page.read_text("utf-8").partition(self._header)
        cells = [line.strip("|").split("|") for line in rows.splitlines() if line.startswith("|")]
        return {row[0].strip(): [cell.strip() for cell in row] for row in cells}

    def add(self, row: Sequence[str]) -> None:
        rows = self.rows() | {row[0]: list(row)}
        above, header, _ = self.page.read_text("utf-8").partition(self._header)
        write_text(self.page, above + header + "".join(f"| {' | '.join(cells)} |\n" for cells in rows.values()))

    @property
    def _header(self) -> str:
        return f"| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}\n"


def write_table(document: Path, header: str, rows: Sequence[str]) -> None:
    """Replace the rows of the document's table with this header. Raises ValueError if it has none."""
    above, found, below = document.read_text("utf-8").partition(header)
    if not found:
        raise ValueError(f"{document} has no table with this header:\n{header}")
    rest = "".join(dropwhile(lambda line: line.startswith("|"), below.splitlines(keepends=True)))
    write_text(document, above + header + "".join(f"{row}\n" for row in rows) + rest)


def write_section(document: Path, name: str, text: str) -> None:
    """Replace what was written under this name in a document, or append it."""
    begin, end = f"<!-- made by {name} -->", f"<!-- end of what {name} made -->"
    before, _, rest = document.read_text("utf-8").partition(begin)
    _, _, after = rest.partition(end)
    parts = (before.strip("\n"), f"{begin}\n{text.strip()}\n{end}", after.strip("\n"))
    write_text(document, "\n\n".join(part for part in parts if part) + "\n")
