"""How long work will still take, from how fast it was done recently."""

from collections import deque

WINDOW_SECONDS = 600.0
_SECONDS_APART = 1.0
_FEWEST = 2  # observations that a rate needs
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class TimeLeft:
    """Estimates the time that work will still take from its last ten minutes.

    The time before the first progress does not count, as ranks take a while to start. Work that starts again at an
    earlier point, such as training that resumes from a checkpoint, is estimated from that point on.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def seconds(self, now: float, done: int, total: int) -> float | None:
        """Return the seconds until ``done``, observed at ``now``, reaches ``total``; None while the rate is unknown."""
        if self._seen and (done < self._seen[-1][1] or done == self._seen[0][1]):
            self._seen.clear()
        if not self._seen or now - self._seen[-1][0] >= _SECONDS_APART:
            self._seen.append((now, done))
        while len(self._seen) > _FEWEST and now - self._seen[1][0] > WINDOW_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        return (now - since) / (done - before) * (total - done) if done > before else None


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
