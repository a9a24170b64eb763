"""The outcomes of a campaign as a table, and what was wrong in words."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, product

from tests.acceptance.io_faults.campaign import ERRORS, MODES, Outcome, Trial

COLUMNS = (
    "trials", "succeeded, result correct", "failed, path named", "failed, path not named", "good data lost",
    "wrong result", "hung", "not reached",
)  # fmt: skip
FAULTS = COLUMNS[3:7]
"""Columns that must be empty."""
_MOST_TEXT = 300


def column_of(outcome: Outcome) -> str:
    """The column that an outcome counts in; the worst one if it fits several."""
    problems = [each.partition(":")[0] for each in outcome["problems"]]
    if "lost" in problems:
        return "good data lost"
    if outcome["result"] == "hang":
        return "hung"
    if problems:
        return "wrong result"
    if not outcome["fired"]:
        return "not reached"
    return {
        "success": "succeeded, result correct", "named": "failed, path named", "unnamed": "failed, path not named",
    }[outcome["result"]]  # fmt: skip


def table(outcomes: Mapping[Trial, Outcome]) -> str:
    """A Markdown table: a row for each operation, error and mode, and one for the sum."""
    counts = Counter((trial.operation, trial.error, trial.mode, column_of(each)) for trial, each in outcomes.items())
    lines = ["| operation | error | mode | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 3) + "|"]
    operations = dict.fromkeys(trial.operation for trial in outcomes)
    lines += [
        _row(faulted, {column: counts[*faulted, column] for column in COLUMNS})
        for faulted in product(operations, ERRORS, MODES)
    ]
    everything = Counter(column_of(each) for each in outcomes.values())
    lines.append(_row(("all", "", ""), everything))
    return "\n".join(lines)


def _row(names: tuple[str, ...], counts: Mapping[str, int]) -> str:
    numbers = [sum(counts.values()), *(counts[column] for column in COLUMNS[1:])]
    return "| " + " | ".join([*names, *map(str, numbers)]) + " |"


def faults(outcomes: Mapping[Trial, Outcome]) -> Iterator[str]:
    """Yield a paragraph for each call and kind of fault, with one of its messages."""

    def key(each: tuple[Trial, Outcome]) -> tuple[str, str, str, str, str]:
        trial, outcome = each
        return trial.operation, column_of(outcome), str(outcome["error"]), trial.call.kind, trial.call.path

    found = sorted(((t, o) for t, o in outcomes.items() if column_of(o) in FAULTS), key=key)
    for (operation, column, error, kind, path), group in groupby(found, key):
        yield _paragraph(f"{operation}: {column}: {kind} {path} ({error})", list(group))


def _paragraph(head: str, group: list[tuple[Trial, Outcome]]) -> str:
    trial, outcome = group[0]
    text = "; ".join(outcome["problems"]) or outcome["text"].strip()[-_MOST_TEXT:]
    return f"{head}: {len(group)} trials, e.g. #{trial.call.ordinal} {trial.error} {trial.mode}: {text}"


def summary(outcomes: Iterable[Outcome]) -> str:
    counts = Counter(map(column_of, outcomes))
    return ", ".join(f"{counts[column]} {column}" for column in COLUMNS[1:] if counts[column])
