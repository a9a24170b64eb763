"""SIGTERM in a rank: a request to end after the current step is done and saved."""

import signal
from types import FrameType, TracebackType
from typing import Self


class Told:
    """A context manager that records whether this process received SIGTERM. For the main thread only."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> bool:
        """Whether SIGTERM was received."""
        return self._told

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._told = True
