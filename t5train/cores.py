"""How many threads or processes are worth starting."""

import os


def num_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))
