"""How long work will still take, from how fast it was done recently. Everything that shows a time left asks here.

No time is better than a wrong one, so none is given before the rate is known. The first steps of training include
compilation, and the first files of many may be small.
"""

from collections import deque
from collections.abc import Sequence

WINDOW_SECONDS = 600.0
_SECONDS_APART = 1.0
_ENOUGH = 8
"""Times that progress was seen, from which a steady rate counts."""
_LIKE_RATES = 2.0
"""The rates of the older and the newer half of what was seen may differ by this factor."""
_LONGEST_OF_FEW, _LONGEST = 4.0, 500.0
"""The time left is at most so many times as long as the rate was steady, for less than _ENOUGH, and at first."""
_LONG_SECONDS = 300.0
"""A rate that was steady for so long counts for any time left."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86400

Seen = Sequence[tuple[float, int]]
"""The time and how much was done, from old to new; more was done each time, except perhaps the last."""


class TimeLeft:
    """Estimates the time that work will still take from its last ten minutes.

    The time before the first progress does not count, as ranks take a while to start. Work that starts again at an
    earlier point, such as training that resumes from a checkpoint, is estimated from that point on.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._work: tuple[str, int] | None = None

    def text(self, now: float, what: str, done: int, total: int | None) -> str:
        """Return ``", 2 h 10 min left"``; empty if unknown, or if nothing is left.

        The arguments after ``now`` are those of ``t5train.progress.Progress``; the text of ``what`` before a comma
        identifies the work.
        """
        if not total:
            return ""
        if (work := (what.partition(",")[0], total)) != self._work:
            self._work = work
            self._seen.clear()
        left = self.seconds(now, done, total)
        return f", {duration(left)} left" if left else ""

    def seconds(self, now: float, done: int, total: int) -> float | None:
        """Return the seconds until ``done``, observed at ``now``, reaches ``total``; None while the rate is unknown."""
        if self._seen and (done < self._seen[-1][1] or done == self._seen[0][1]):
            self._seen.clear()
        if not self._seen or (done > self._seen[-1][1] and now - self._seen[-1][0] >= _SECONDS_APART):
            self._seen.append((now, done))
        while len(self._seen) > _ENOUGH + 1 and now - self._seen[1][0] > WINDOW_SECONDS:
            self._seen.popleft()
        steady = _steady([*self._seen, (now, done)] if now > self._seen[-1][0] else [*self._seen])
        left, observed = _rest(steady, total), now - steady[0][0]
        if left is None or (left > _LONGEST * observed and observed < _LONG_SECONDS):
            return None
        return left


def seconds_of_steps(durations: Sequence[float], step: int, num_steps: int) -> float | None:
    """Return the seconds until ``num_steps``, given how long the steps up to ``step`` took; None if that is unknown."""
    at, seen = 0.0, [(0.0, step - len(durations))]
    for number, seconds in enumerate(durations, seen[0][1] + 1):
        at += seconds
        seen.append((at, number))
    return _rest(_steady(seen), num_steps)


def _steady(seen: Seen) -> Seen:
    """Return the newest part of ``seen`` in which work was done at one rate."""
    while len(seen) > 2 and not _is_steady(seen):
        seen = seen[len(seen) // 2 :]
    return seen


def _is_steady(seen: Seen) -> bool:
    (began, first), (middle, between), (ended, last) = seen[0], seen[len(seen) // 2], seen[-1]
    older, newer = (between - first) * (ended - middle), (last - between) * (middle - began)
    return older <= _LIKE_RATES * newer and newer <= _LIKE_RATES * older


def _rest(steady: Seen, total: int) -> float | None:
    """Return the seconds until ``total`` at this rate; None if it was seen too rarely for so long a time."""
    (began, first), (now, done) = steady[0], steady[-1]
    advances = len({done for _, done in steady}) - 1
    if advances < 2:
        return None
    left = (now - began) / (done - first) * (total - done)
    return left if advances >= _ENOUGH or left <= _LONGEST_OF_FEW * (now - began) else None


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``2 h 10 min``. From 10 min on, seconds are left out."""
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < 10 * _MINUTE:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"
