"""A bound on how much is told in a second, with room for a burst."""

import time


class RateLimit:
    """Lets ``burst`` through at once, then ``a_second``."""

    def __init__(self, a_second: float, burst: float) -> None:
        self._a_second, self._burst = a_second, burst
        self._allowance, self._counted_at = burst, time.monotonic()

    def take(self, wanted: int) -> int:
        """How many of those wanted may pass now."""
        now = time.monotonic()
        self._allowance = min(self._burst, self._allowance + (now - self._counted_at) * self._a_second)
        self._counted_at = now
        taken = min(wanted, int(self._allowance))
        self._allowance -= taken
        return taken
