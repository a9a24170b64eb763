"""SIGTERM in a rank: a request to end after the current step is done and saved."""

import signal
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """A context manager that records whether this process received SIGTERM. For the main thread only."""

    def __init__(self) -> None:
        self._was_received = False

    def __call__(self) -> bool:
        """Whether SIGTERM was received."""
        return self._was_received

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._was_received = True
