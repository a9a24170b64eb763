"""Waits for what other processes do."""

import time
from collections.abc import Callable


def await_that(condition: Callable[[], object], seconds: float = 600.0, every: float = 0.2) -> None:
    """Wait until a condition holds. The default is ample, for machines that do other work too. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not after {seconds:.0f} s")
        time.sleep(every)
