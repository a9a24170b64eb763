"""The story of one run as text: headed sections of short lines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from flows.cli.runs.run_table import steps_text
from infra.head.launch.start_record import Start
from infra.head.runs.run_state import State
from infra.head.runs.run_story import AttemptSummary, Losses, RunStory, StoredCheckpoint
from t5train.quantities import format_bytes
from t5train.report.time_left import duration

_INDENT = "  "
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
        yield from (f"{_INDENT}{line}" for line in lines)


def _fact(label: str, text: object) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _facts(story: RunStory) -> list[str]:
    state = story.state
    tokens = f", {story.tokens:,} tokens to train on" if story.tokens is not None else ""
    is_over = state.resumable_step is None or state.state == State.PUBLISHED
    resumes = "" if is_over else f", resumes at {state.resumable_step:,}"
    facts: dict[str, object] = {
        "folder": state.folder,
        "recipe": story.recipe,
        "text": story.source and f"{story.source}{tokens}",
        "step": f"{steps_text(state)}{resumes}",
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
    found = {
        "training, all target tokens, first step": (losses.first, ""),
        "training, all target tokens, last step": (losses.last, ""),
        "best validation, masked tokens": (losses.best_validation, at),
        "unigram baseline, masked tokens": (baseline, ""),
    }
    return [f"{loss:.4f} {what}{more}" for what, (loss, more) in found.items() if loss is not None]


def _seconds(since: str, until: str) -> float:
    return max(0.0, (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds())


def _time(at: str) -> str:
    return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M:%S} UTC"
