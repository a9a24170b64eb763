"""The result of a benchmark: what was measured, where and with which command, as JSON and as a Markdown table."""

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.measured_conditions import commit
from t5train.files.atomic import write_text
from tests.support.hardware import hardware


class Spread(BaseModel):
    """A median with its range."""

    model_config = ConfigDict(extra="forbid")
    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{_number(self.median)} ({_number(self.min)} to {_number(self.max)})"


Figure = str | int | float | Spread | None


class Result(BaseModel):
    """What a benchmark found, and under which conditions. Results are kept in benchmarks/results."""

    model_config = ConfigDict(extra="forbid")
    what: str
    """What was measured, as a title."""
    command: str
    date: str = Field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    commit: str | None
    """None if it is not known."""
    machine: str
    notes: str = ""
    """Versions, load, and what a reader must know about the figures."""
    rows: Sequence[Mapping[str, Figure]]

    def table(self, columns: Sequence[str] = (), *, ranges: bool = True) -> str:
        """Return a Markdown table of these columns, all if none is given, with the ranges of figures or without."""
        shown = columns or list(dict.fromkeys(column for row in self.rows for column in row))
        rows = [[_cell(row.get(column), ranges) for column in shown] for row in self.rows]
        header, *lines = (f"| {' | '.join(cells)} |\n" for cells in (shown, *rows))
        return "".join([header, f"{'|---' * len(shown)}|\n", *lines])

    def text(self) -> str:
        """Return the conditions and the table, for a terminal."""
        conditions = f"{self.what}. {self.date}, commit {self.commit}, {self.machine}: `{self.command}`. {self.notes}"
        return f"{fill(conditions, 120, break_on_hyphens=False, break_long_words=False)}\n\n{self.table()}"

    def show(self, into: Path | None) -> None:
        """Print the result, and write it to a JSON file if one is given."""
        print(self.text())
        if into:
            write_text(into, self.model_dump_json(indent=1) + "\n")


def add_into(parser: argparse.ArgumentParser) -> None:
    """Add the option with which a command keeps its result."""
    parser.add_argument("--into", type=Path, help="JSON file to write the result to, as benchmarks/results/NAME.json")


def measured_here(what: str, rows: Sequence[Mapping[str, Figure]], notes: str = "") -> Result:
    """Return what the running command has measured on this machine, just now."""
    return Result(
        what=what,
        command=f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".rstrip(),
        commit=commit(),
        machine=hardware(),
        notes=f"Load average {os.getloadavg()[0]:.1f}. {notes}".rstrip(),
        rows=rows,
    )


def spread(values: Sequence[float], digits: int) -> Figure:
    """Return the median of the values, and their range unless they are equal, all rounded."""
    median, low, high = (round(each, digits) for each in (statistics.median(values), min(values), max(values)))
    return median if low == high else Spread(median=median, min=low, max=high)


def _cell(figure: Figure, ranges: bool) -> str:
    if figure is None:
        return ""
    if isinstance(figure, Spread) and not ranges:
        return _number(figure.median)
    return _number(figure) if isinstance(figure, int | float) else str(figure)


def _number(value: float) -> str:
    return f"{value:,}".removesuffix(".0")
