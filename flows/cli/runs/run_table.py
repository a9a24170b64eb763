"""The table of runs: aligned in a terminal, with a second line where there is more to say; tab-separated in a pipe."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from flows.cli.terminal import say
from infra.head.runs.run_state import RunState, State
from infra.node.attempts.log_tail import printable
from t5train.report.time_left import duration

_COLUMNS = ("name", "state", "step", "resumes at", "training loss", "tokens/s", "left", "active", "note")
_LEFT_ALIGNED = {"name", "state"}
_BETWEEN = "  "
_INDENT = "    "
_SHORTEST_NAME = 12
_UNKNOWN = "-"


def show_runs(states: Sequence[RunState]) -> None:
    """Print the table on standard output."""
    rows = [tuple(map(printable, _cells(state))) for state in states]
    console = Console(emoji=False, markup=False, highlight=False)
    if not console.is_terminal:
        for row in (_COLUMNS, *rows):
            say("\t".join(row))
        return
    for line in table_lines(rows, console.width):
        console.print(Text(line), no_wrap=True, crop=True)


def table_lines(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Return the table with a line for each row, and one for its note if it has one. No line exceeds ``width``."""
    columns = _COLUMNS[:-1]
    cells = [columns, *(row[:-1] for row in rows)]
    widths = [max(cell_len(row[number]) for row in cells) for number in range(len(columns))]
    too_wide = sum(widths) + len(_BETWEEN) * (len(widths) - 1) - width
    widths[0] = max(widths[0] - max(0, too_wide), min(widths[0], _SHORTEST_NAME))
    lines = [_aligned(columns, widths)]
    for row in rows:
        lines.append(_aligned(row[:-1], widths))
        if row[-1] != _UNKNOWN:
            lines.append(_INDENT + shortened(row[-1], width - len(_INDENT)))
    return [shortened(line, width) for line in lines]


def shortened(text: str, width: int) -> str:
    """Return ``text`` without trailing spaces, and shortened to ``width`` cells of a terminal."""
    line = text.rstrip()
    return line if cell_len(line) <= width else f"{set_cell_size(line, width - 1).rstrip()}…"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = []
    for name, cell, width in zip(_COLUMNS, cells, widths, strict=False):
        fitting = shortened(cell, width)
        padding = " " * (width - cell_len(fitting))
        aligned.append(fitting + padding if name in _LEFT_ALIGNED else padding + fitting)
    return _BETWEEN.join(aligned)


def _cells(state: RunState) -> list[str]:
    return [
        state.name,
        state.state.value,
        steps_text(state),
        _number(None if state.state == State.PUBLISHED else state.resumable_step),
        _UNKNOWN if state.loss is None else f"{state.loss:.4f}",
        _number(state.tokens_per_second),
        _UNKNOWN if state.seconds_left is None else duration(state.seconds_left),
        _UNKNOWN if state.seconds_since_activity is None else f"{duration(state.seconds_since_activity)} ago",
        _note(state),
    ]


def steps_text(state: RunState) -> str:
    """Return such as ``1,200 of 65,536``."""
    if state.num_steps is None:
        return _number(state.step)
    return f"{state.step or 0:,} of {state.num_steps:,}"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}"


def _note(state: RunState) -> str:
    """What a running run is doing, what went wrong, or where the run is published; in one line."""
    notes = {State.RUNNING: state.stage, State.PUBLISHED: state.published}
    return " ".join((state.error or notes.get(state.state) or _UNKNOWN).split())
