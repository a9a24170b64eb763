"""How much memory of this machine some work takes, whatever holds it: processes, drivers, pinned pages."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS_BETWEEN_SAMPLES = 0.5


def memory_bytes(key: str) -> int:
    """A line of /proc/meminfo in bytes, such as MemAvailable."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


class PeakMemory:
    """A context manager that measures the largest fall of available memory (``rise``) while its block runs.

    It includes the memory of other programs, so the machine should do nothing else.
    """

    def __init__(self) -> None:
        self._before = self._minimum = memory_bytes("MemAvailable")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def rise(self) -> int:
        return self._before - self._minimum

    def _watch(self) -> None:
        while not self._stopped.wait(SECONDS_BETWEEN_SAMPLES):
            self._minimum = min(self._minimum, memory_bytes("MemAvailable"))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
