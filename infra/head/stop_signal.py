"""SIGTERM to a head: ranks get the time to save before it has its effect."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_log = logging.getLogger(__name__)


class Stopped(BaseException):
    """SIGTERM came to a process that had no handler of its own for it."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block SIGTERM raises; in the end it has the effect that it would have had.

    A handler that is installed already stays, and is taken to raise an exception of its own, as Prefect's does.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    except Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def undisturbed(what: str) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the end of the block, which must not be left half done and takes bounded time.

    ``what`` is under way, in words for whoever presses Ctrl-C again. Other threads never get these signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)
        _log.warning("%s: please wait", what)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def is_stop(error: BaseException) -> bool:
    """Whether an exception that ended a block was SIGTERM's, and neither a failure nor Ctrl-C."""
    return not isinstance(error, Exception | KeyboardInterrupt)


def _raise(_number: int, _frame: object) -> NoReturn:
    raise Stopped
