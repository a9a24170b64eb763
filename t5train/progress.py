"""How a long stage reports its progress. The caller decides who shows it, and how."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar


class Progress(Protocol):
    """Called now and then by a stage, at most a few times a second's worth of work."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` units of ``what`` (``total`` is None while it is not known)."""
        ...


def silent(what: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


_TELL_SECONDS = 0.5
Result = TypeVar("Result")


class Interrupted(Exception):
    """Raised within what was told to end in the midst of its work."""


class Interruptible:
    """A progress callback for other threads, which ends them; it keeps what they have told last."""

    def __init__(self) -> None:
        self.is_told_to_end = False
        self._last: tuple[str, int, int | None] | None = None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Keep it; Interrupted once it is time to end."""
        if self.is_told_to_end:
            raise Interrupted
        self._last = (what, done, total)

    def pass_on(self, progress: Progress) -> None:
        """Tell what was told last."""
        if self._last is not None:
            progress(*self._last)


def relayed(act: Callable[[Progress], Result], progress: Progress) -> Result:
    """The result of ``act``; what it tells of its progress, in whatever thread, is told in this one.

    Left by an exception, as of SIGTERM, it breaks off what is being done.
    """
    of_threads = Interruptible()
    with ThreadPoolExecutor(1, thread_name_prefix="work") as thread:
        result = thread.submit(act, of_threads)
        try:
            while wait([result], timeout=_TELL_SECONDS).not_done:
                of_threads.pass_on(progress)
            of_threads.pass_on(progress)
        finally:
            of_threads.is_told_to_end = True
    return result.result()
