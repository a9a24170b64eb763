"""How a long stage reports its progress. The caller decides where and how to show it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar


class Progress(Protocol):
    """A callback that a stage calls from time to time, at most a few times per second."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Report that ``done`` of ``total`` units of ``what`` are done (``total`` is None while it is not known)."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """Ignore progress."""


Report = tuple[str, int, int | None]
"""The arguments of a call of Progress."""

_REPORT_SECONDS = 0.5
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


def relayed(act: Callable[[Progress], Result], progress: Progress) -> Result:
    """Run ``act`` in another thread and return its result. Its progress is reported in this thread.

    An exception in this thread, such as one raised on SIGTERM, interrupts ``act``.
    """
    of_threads = Interruptible()
    with ThreadPoolExecutor(1, thread_name_prefix="work") as thread:
        result = thread.submit(act, of_threads)
        try:
            while wait([result], timeout=_REPORT_SECONDS).not_done:
                of_threads.pass_on(progress)
            of_threads.pass_on(progress)
        finally:
            of_threads.must_stop = True
    return result.result()
