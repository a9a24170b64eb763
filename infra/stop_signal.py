"""SIGTERM to a head: ranks get the time to save before it has its effect."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


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


def is_stop(error: BaseException) -> bool:
    """Whether an exception that ended a block was SIGTERM's, and neither a failure nor Ctrl-C."""
    return not isinstance(error, Exception | KeyboardInterrupt)


def _raise(_number: int, _frame: object) -> NoReturn:
    raise Stopped
