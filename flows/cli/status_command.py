"""``status``: the runs under a root and their progress, or the whole story of one run. Only reads files.

The table of runs is aligned in a terminal, with a second line where there is more to say, and tab-separated in a pipe.
The story has headed sections of short lines.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from flows.cli.options import RootOption, existing_root, runs_like
from flows.cli.terminal import say
from infra.head.launch.start_record import Start
from infra.head.runs.run_lookup import find_run
from infra.head.runs.run_state import RunState, State, run_states
from infra.head.runs.run_story import AttemptSummary, Losses, RunStory, StoredCheckpoint, run_story
from infra.node.attempts.log_tail import printable
from t5train.quantities import format_bytes, quantity
from t5train.report.time_left import duration

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Run to tell everything about: its name, or its folder", autocompletion=runs_like
    ),
]
JSON_SCHEMA_VERSION = 1


def status(
    run: RunArgument = None,
    root: RootOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with keys that do not change")] = False,
) -> None:
    """List the runs under a root: state, step, loss, speed, time left, last error. With RUN, tell its whole story.

    $ t5-pretrain status
    $ t5-pretrain status mine --root /data/t5
    $ t5-pretrain status --json
    """
    folder = existing_root(root)
    if run is not None:
        story = run_story(find_run(folder, run))
        if as_json:
            _say_json(asdict(story.state) | {name: value for name, value in asdict(story).items() if name != "state"})
        else:
            for line in story_lines(story):
                say(line)
        return
    states = run_states(folder)
    if as_json:
        _say_json({"root": str(folder), "runs": [asdict(state) for state in states]})
    elif states:
        show_runs(states)
    else:
        say(f"no runs yet under {folder}; --root names another folder")


def _say_json(values: dict[str, object]) -> None:
    say(json.dumps({"schema_version": JSON_SCHEMA_VERSION} | values, indent=1, default=str))


_COLUMNS = ("name", "state", "step", "resumes at", "training loss", "tokens/s", "left", "active", "note")
_LEFT_ALIGNED = {"name", "state"}
_BETWEEN = "  "
_NOTE_INDENT = "    "
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
            lines.append(_NOTE_INDENT + shortened(row[-1], width - len(_NOTE_INDENT)))
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
    """What a running run is doing, what went wrong, why a run is done, or where it is published; in one line."""
    notes = {State.RUNNING: state.stage, State.PUBLISHED: state.published}
    if state.has_ended_early:
        notes[State.TRAINED] = _ENDED_EARLY
    return " ".join((state.error or notes.get(state.state) or _UNKNOWN).split())


_ENDED_EARLY = "training ended early"
_SECTION_INDENT = "  "
_LABEL_WIDTH = 14


def story_lines(story: RunStory) -> Iterator[str]:
    """Yield the lines of the story."""
    state = story.state
    doing = f" ({state.stage})" if state.stage and state.state == State.RUNNING else ""
    yield f"{state.name}: {state.state}{doing}"
    yield from _section("", _facts(story))
    yield from _section("last start", _start_lines(story.last_start))
    yield from _section("what went wrong", _error_lines(story))
    yield from _section("settings that differ from the recipe", _setting_lines(story.settings))
    yield from _section("attempts", _attempt_lines(story.attempts))
    yield from _section("checkpoints", _checkpoint_lines(story.checkpoints))
    yield from _section("losses (nats per token)", _loss_lines(story.losses))
    yield from _section("reports", [str(path) for path in story.reports])
    yield from _section("not readable", story.faults)
    if story.next_command is not None:
        yield from _section("to continue", [story.next_command])


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from [title] if title else []
        yield from (f"{_SECTION_INDENT}{line}" for line in lines)


def _fact(label: str, text: object) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _facts(story: RunStory) -> list[str]:
    state = story.state
    tokens = f", {story.tokens:,} tokens to train on" if story.tokens is not None else ""
    if story.pairs is not None:
        tokens = f", {quantity(story.pairs, 'pair')} to train on, with {story.tokens or 0:,} target tokens"
    is_over = state.resumable_step is None or state.state == State.PUBLISHED
    resumes = "" if is_over else f", resumes at {state.resumable_step:,}"
    facts: dict[str, object] = {
        "folder": state.folder,
        "recipe": story.recipe,
        "data": story.source and f"{story.source}{tokens}",
        "step": f"{steps_text(state)}{f', where {_ENDED_EARLY}' if state.has_ended_early else resumes}",
        "speed": state.tokens_per_second and f"{state.tokens_per_second:,.0f} tokens/s",
        "left": state.seconds_left and duration(state.seconds_left),
        "active": state.seconds_since_activity is not None and f"{duration(state.seconds_since_activity)} ago",
        "held by": state.holder,
        "certificate": story.certificate,
        "published": state.published or "no",
    }
    return [_fact(label, text) for label, text in facts.items() if text]


def _start_lines(start: Start | None) -> list[str]:
    if start is None:
        return []
    took = f" after {duration(_seconds(start.started_at, start.ended_at))}" if start.ended_at else ""
    stage = f", last stage: {start.stage}" if start.stage else ""
    return [
        _fact("command", start.command),
        _fact("in folder", start.working_folder),
        _fact("process", f"{start.pid} on {start.host}, started {_time(start.started_at)}{stage}"),
        _fact("end", f"{start.how}{took}" if start.how else "none recorded"),
    ]


def _error_lines(story: RunStory) -> list[str]:
    start, state = story.last_start, story.state
    if state.state == State.CRASHED:
        return [
            "The process that held the run is gone without having said why: it was killed (check `dmesg` for the OOM",
            "killer), or the machine went down. The run resumes from its newest complete checkpoint.",
        ]
    error = start.error if start is not None and start.error else state.error
    return [] if error is None or state.state == State.RUNNING else error.splitlines()


def _setting_lines(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def _attempt_lines(attempts: Sequence[AttemptSummary]) -> list[str]:
    lines = []
    for each in attempts:
        took = f" for {duration(_seconds(each.started_at, each.ended_at))}" if each.started_at and each.ended_at else ""
        started = f"{_time(each.started_at)}{took}" if each.started_at else "at an unknown time"
        steps = "" if each.from_step is None else f", steps {each.from_step:,} to {each.to_step or each.from_step:,}"
        hosts = f", on {', '.join(each.hosts)}" if each.hosts else ""
        lines.append(f"{each.number}: {started}{steps}{hosts}: {each.ended}")
    return lines


def _checkpoint_lines(checkpoints: Sequence[StoredCheckpoint]) -> list[str]:
    return [
        f"step {each.step:,}: {format_bytes(each.size_bytes)}, {'complete' if each.is_complete else 'not complete'}"
        + (f" ({each.note})" if each.note else "")
        for each in checkpoints
    ]


def _loss_lines(losses: Losses) -> list[str]:
    at = f", at step {losses.best_validation_step:,}" if losses.best_validation_step is not None else ""
    # Comparable with validation only: training losses include sentinels, which are easier on average.
    baseline = losses.unigram_baseline if losses.best_validation is not None else None
    tokens = "masked tokens" if losses.exact_match is None else "target tokens"
    found = {
        "training, all target tokens, first step": (losses.first, ""),
        "training, all target tokens, last step": (losses.last, ""),
        f"best validation, {tokens}": (losses.best_validation, at),
        f"unigram baseline, {tokens}": (baseline, ""),
    }
    lines = [f"{loss:.4f} {what}{more}" for what, (loss, more) in found.items() if loss is not None]
    if losses.exact_match is not None:
        of_tasks = ", ".join(f"{task} {share:.2%}" for task, share in losses.exact_match_of_tasks.items())
        of_each = f" ({of_tasks})" if of_tasks else ""
        lines.append(f"{losses.exact_match:.2%} of the pairs predicted exactly at the last validation{of_each}")
    if losses.best is not None:
        lines.append(
            f"{losses.best:.4f} best {losses.best_metric}, which chooses the result, at step {losses.best_step:,}"
        )
    return lines


def _seconds(since: str, until: str) -> float:
    return max(0.0, (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds())


def _time(at: str) -> str:
    return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M:%S} UTC"
