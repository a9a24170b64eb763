"""How a long stage reports its progress. The caller decides where and how to show it."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from typing import Protocol, TypeVar


class Progress(Protocol):
    """A callback that a stage calls from time to time, at most a few times per second."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` units of ``what`` are done (``total`` is None while it is not known)."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """Ignore progress."""


def adding(progress: Progress, what: str, total: int | None) -> Callable[[int], None]:
    """Return a function that takes how many more units of ``what`` are done, and reports how many are in all.

    Several threads may call it.
    """
    done, lock = 0, Lock()

    def advance(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            progress(what, done, total)

    return advance


Report = tuple[str, int, int | None]
"""The arguments of a call of Progress."""

_REPORT_SECONDS = 0.5
_STALLED_SECONDS = 300.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Interrupted(Exception):
    """Raised inside work that is asked to stop before it is done."""


class Interruptible:
    """A progress callback for work in another thread. It keeps the latest report, and can stop the work."""

    def __init__(self) -> None:
        self.must_stop = False
        self.last: Report | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Keep the report. Raises Interrupted if the work is to stop."""
        if self.must_stop:
            raise Interrupted
        self.last = (what, done, total)

    def pass_on(self, progress: Progress) -> None:
        """Forward the latest report."""
        if self.last is not None:
            progress(*self.last)


def relayed(act: Callable[[Progress], Result], progress: Progress, doing: str = "working") -> Result:
    """Run ``act`` in another thread and return its result. Its progress is reported in this thread.

    Logs a warning that says what it is ``doing`` when there has been no progress for 5 minutes, and again each time
    that this has doubled. An exception in this thread, such as one raised on SIGTERM, interrupts ``act``.
    """
    of_threads, stall = Interruptible(), _Stall(doing)
    with ThreadPoolExecutor(1, thread_name_prefix="work") as thread:
        result = thread.submit(act, of_threads)
        try:
            while wait([result], timeout=_REPORT_SECONDS).not_done:
                of_threads.pass_on(progress)
                stall.note(of_threads.last)
            of_threads.pass_on(progress)
        finally:
            of_threads.must_stop = True
    return result.result()


class _Stall:
    """Warns of work that makes no progress."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._last: Report | None = None
        self._since, self._warn_at_seconds = time.monotonic(), _STALLED_SECONDS

    def note(self, last: Report | None) -> None:
        """Note the latest report of the work."""
        if last != self._last:
            self._last, self._since, self._warn_at_seconds = last, time.monotonic(), _STALLED_SECONDS
        elif (seconds := time.monotonic() - self._since) >= self._warn_at_seconds:
            self._warn_at_seconds = 2 * seconds
            _log.warning(
                "no progress for %.0f min while %s%s. Check the hosts, the disks and the network",
                seconds // 60,
                self._doing,
                "" if last is None else f" ({last[0]}: {last[1]:,}{'' if last[2] is None else f' of {last[2]:,}'})",
            )
