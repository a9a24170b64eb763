"""Terminal output: progress of long stages (a bar on a terminal, occasional lines in a file or pipe), lines, tables."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from infra.node.attempts.log_tail import printable
from t5train.errors import printable as one_line
from t5train.files.os_errors import naming
from t5train.progress import Progress as ProgressCallback
from t5train.report.time_left import TimeLeft

SECONDS_BETWEEN_LINES = 5.0
_LOGGERS = ("t5train", "infra")


class LineProgress:
    """Progress as plain lines with the time left, at most one every few seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._written_at = time.monotonic()
        self._time_left = TimeLeft()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Write a line if enough time has passed since the last one. The text before a comma identifies the work."""
        now = time.monotonic()
        left = self._time_left.text(now, what, done, total)
        if now - self._written_at < SECONDS_BETWEEN_LINES:
            return
        self._written_at = now
        share = f" of {total:,} ({100 * done / total:.0f} %)" if total else ""
        self.console.print(f"{done:,}{share} {what}{left}")


class _Amount(ProgressColumn):
    """How much is done of how much. Work of unknown length has no such column: its description begins with it."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}" if task.total is not None else "")


class BarProgress:
    """Progress as a bar for the current work. The bar disappears at the end, as its figures would be out of date."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._work: str | None = None
        self._bar: TaskID | None = None
        self._time_left = TimeLeft()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Update the bar of ``what``; only the text before a comma identifies the work."""
        work = what.partition(",")[0]
        if self._bar is None or work != self._work:
            if self._bar is not None:
                self._bars.remove_task(self._bar)
            self._work, self._bar = work, self._bars.add_task(what, total=total, left="")
        shown = what if total is not None else f"{done:,} {what}"
        left = self._time_left.text(time.monotonic(), what, done, total).removeprefix(", ")
        self._bars.update(self._bar, description=shown, completed=done, total=total, left=left)

    @property
    def console(self) -> Console:
        """The console that prints lines above the bar."""
        return self._bars.console


class LogAbove(logging.Handler):
    """Prints log lines on a console, above the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print only the message."""
        self._console.print(printable(record.getMessage()), soft_wrap=True)


@contextmanager
def stage_display() -> Iterator[ProgressCallback]:
    """Show progress as ``progress_display`` does, and the library's log from INFO on. Flows log to Prefect instead."""
    with progress_display() as progress:
        handler = LogAbove(progress.console)
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        before = [logger.level for logger in loggers]
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        try:
            yield progress
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)


@contextmanager
def progress_display() -> Iterator[LineProgress | BarProgress]:
    """Yield a progress callback that shows a stage's reports on standard error within the block."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        yield LineProgress(console)
        return
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    columns = text, BarColumn(20), _Amount(), TextColumn("{task.fields[left]}", markup=False)
    with Progress(*columns, console=console, expand=True, transient=True) as bars:
        yield BarProgress(bars)


def say(line: str) -> None:
    """Print one line of a result on standard output, without wrapping, markup or terminal control sequences."""
    if sys.stdout is not None:  # as it is if it was closed when Python started
        with naming(PurePath("standard output")):
            sys.stdout.write(printable(line) + "\n")
            sys.stdout.flush()


def complain(line: str) -> None:
    """Print one line on standard error, sanitised like ``say``, because errors may quote hosts and stores."""
    if sys.stderr is not None:
        sys.stderr.write(printable(line) + "\n")
        sys.stderr.flush()


def show_json(value: object) -> None:
    """Print a result on standard output as JSON, for programs. Control characters are escaped."""
    say(json.dumps(value, indent=1))


def _cell(text: str) -> str:
    """Return the text of a cell in one line: a tab or line end in it would begin another cell or row."""
    return one_line(printable(text))


def show_rows(rows: list[list[str]]) -> None:
    """Print aligned columns on standard output, tab-separated if that is not a terminal. The last column wraps."""
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        for row in rows:
            say("\t".join(map(_cell, row)))
        return
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table, markup=False)


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table on standard output, tab-separated if that is not a terminal."""
    console = Console(emoji=False)
    if not console.is_terminal:
        for row in [columns, *rows]:
            say("\t".join(map(_cell, row)))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table, markup=False)
