"""Finished measurements of benchmarks.training_peers: kept in a file, and summed up."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.finished_rows import FinishedRow, FinishedRows, Subject
from benchmarks.measured_result import Figure, spread

OURS, DENSE, ALONE = "ours", "ours dense", "ours alone"
TRIAL = 0
"""The repeat of a short measurement that only chooses a tuning."""
FIRST_GUESS_SECONDS = 150.0
"""How long a measurement is expected to take before anything was measured: start, compilation, and 25 steps."""


class Tuning(NamedTuple):
    """What tuning changes."""

    micro_batch_sequences: int
    attention: str | None = None
    """An implementation of attention in transformers; None for its default."""


class Outcome(FinishedRow):
    """A finished measurement of a contender."""

    contender: str
    repeat: int
    tuning: Tuning
    out_of_memory: bool = False
    """If true, the rest has its default values."""
    step_seconds: tuple[float, ...] = ()
    tokens_a_step: int = 0
    memory_bytes: int = 0
    reserved_bytes: int = 0
    host_memory_bytes: int = 0
    parameters: int = 0
    precision: str = ""
    attention: str = ""
    """The implementation that ran."""
    first_loss: float | None = None
    last_loss: float | None = None

    @property
    def seconds(self) -> float:
        """Median of the steps."""
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of encoder and decoder, over all ranks."""
        return self.tokens_a_step / self.seconds

    def __str__(self) -> str:
        size = f"micro-batch {self.tuning.micro_batch_sequences}"
        if self.out_of_memory:
            return f"out of memory with {size}"
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {self.seconds * 1e3:.1f} ms a step"
        return f"{speed}, {self.memory_bytes / 2**30:.1f} GiB ({size}{self.attention and ', '}{self.attention})"


class Outcomes:
    """The finished measurements of one subject, in a file that may also hold those of others."""

    def __init__(self, path: Path, subject: Subject) -> None:
        """``path``: the file, which need not exist yet."""
        self._rows = FinishedRows(path, Outcome, subject)
        if ignored := self._rows.ignored():
            print(ignored, flush=True)

    def add(self, outcome: Outcome) -> None:
        """Append a measurement to the file, on disk when this returns."""
        self._rows.add(outcome)

    def of(self, contender: str) -> list[Outcome]:
        """Return a contender's measurements, trials included."""
        return [each for each in self._rows.finished if each.contender == contender]

    def has(self, contender: str, repeat: int, tuning: Tuning) -> bool:
        """Return whether this measurement is finished."""
        return any((each.repeat, each.tuning) == (repeat, tuning) for each in self.of(contender))

    def expected_seconds(self, contender: str, tuning: Tuning) -> float:
        """Return how long a measurement will take: as long as the last one that is like it, of any code and machine.

        Prefers one with the same tuning, then the longest of this contender, then the longest of any.
        """
        of_it = [each for each in self._rows.like() if each.contender == contender]
        like = [each.duration_seconds for each in of_it if each.tuning == tuning][-1:]
        for durations in (like, *([each.duration_seconds for each in group] for group in (of_it, self._rows.like()))):
            if durations:
                return max(durations)
        return FIRST_GUESS_SECONDS


def untuned(micro_batch: int, tried: Sequence[Outcome]) -> Tuning | None:
    """Return the recipe's micro-batch, halved until it fits into memory; None if no size does."""
    full = {each.tuning for each in tried if each.out_of_memory}
    sizes = _halves(micro_batch)
    return next((Tuning(size) for size in sizes if Tuning(size) not in full), None)


def next_trial(micro_batch: int, largest: int, attentions: Sequence[str], tried: Sequence[Outcome]) -> Tuning | None:
    """Return the tuning to try next; None when ``fastest`` can decide.

    First each attention is tried with the recipe's micro-batch, then the better one with twice and with half of it. If
    nothing fits into memory, smaller halves follow. ``largest`` is the largest micro-batch that a step can have.
    """
    trials = {each.tuning: each for each in tried if each.repeat == TRIAL}
    for attention in attentions:
        if Tuning(micro_batch, attention) not in trials:
            return Tuning(micro_batch, attention)
    best = fastest(list(trials.values()))
    attention = (best and best.attention) or attentions[0]
    fits = any(size == micro_batch and not each.out_of_memory for (size, _), each in trials.items())
    doubled = [2 * micro_batch] if fits and 2 * micro_batch <= largest else []
    for size in (*doubled, *_halves(micro_batch)[1:]):
        if Tuning(size, attention) not in trials:
            return Tuning(size, attention)
        if size < micro_batch and fastest(list(trials.values())):
            break
    return None


def fastest(tried: Sequence[Outcome]) -> Tuning | None:
    """Return the fastest tuning of all trials; None if none fitted into memory."""
    fit = [each for each in tried if each.repeat == TRIAL and not each.out_of_memory]
    return min(fit, key=lambda each: each.seconds).tuning if fit else None


def _halves(size: int) -> list[int]:
    return [size >> power for power in range(size.bit_length()) if size % (1 << power) == 0]


def rows(outcomes: Outcomes, contenders: Sequence[str]) -> list[dict[str, Figure]]:
    """Return what was measured of each contender: medians of the repeats, with their range."""
    ours = {each.repeat: each for each in outcomes.of(OURS)}
    return [_row(name, outcomes.of(name), ours) for name in contenders if outcomes.of(name)]


def _row(name: str, measured: Sequence[Outcome], ours: dict[int, Outcome]) -> dict[str, Figure]:
    repeats = [each for each in measured if each.repeat != TRIAL and not each.out_of_memory]
    if not repeats:
        reason = "out of memory" if all(each.out_of_memory for each in measured) else "only tried"
        return {"contender": name, "tokens/s": reason}
    ratios = [ours[each.repeat].tokens_per_second / each.tokens_per_second for each in repeats if each.repeat in ours]
    last = repeats[-1]
    return {
        "contender": name,
        **speed_and_memory(repeats),
        "ours relative to it": spread(ratios, 2) if ratios and name != OURS else None,
        "precision": last.precision,
        "micro-batch": last.tuning.micro_batch_sequences,
        "attention": last.attention,
    }


def speed_and_memory(repeats: Sequence[Outcome]) -> dict[str, Figure]:
    """Return the medians of repeats, with their range."""
    return {
        "tokens/s": spread([each.tokens_per_second for each in repeats], 0),
        "step, ms": spread([each.seconds * 1e3 for each in repeats], 1),
        "peak memory, GiB": spread([each.memory_bytes / 2**30 for each in repeats], 1),
        "reserved, GiB": spread([each.reserved_bytes / 2**30 for each in repeats], 1),
    }
