"""How much memory of this machine some work takes, whatever holds it: processes, drivers, pinned pages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS_BETWEEN_SAMPLES = 0.5


def memory_bytes(key: str) -> int:
    """A line of /proc/meminfo in bytes, such as MemAvailable."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


@contextmanager
def available_memory() -> Iterator[list[int]]:
    """Sample the memory that is available, in bytes, before and while a block runs.

    The largest fall is what the block takes, if the machine does nothing else.
    """
    samples, stopped = [memory_bytes("MemAvailable")], threading.Event()

    def watch() -> None:
        while not stopped.wait(SECONDS_BETWEEN_SAMPLES):
            samples.append(memory_bytes("MemAvailable"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stopped.set()
        thread.join()
