"""Handles SIGTERM and Ctrl-C of the head, so that ranks get time to save before the signal takes effect."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SAME_STOP_SECONDS = 1.0
"""A Ctrl-C this soon after another one is the same: `timeout -s INT`, for instance, sends it to the command and then to
the command's process group."""
_log = logging.getLogger(__name__)


class Stopped(BaseException):
    """Raised when SIGTERM arrives while the process has no handler of its own for it."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Make SIGTERM raise ``Stopped`` within the block. After the block, the signal takes its usual effect.

    A handler that is already installed is kept. It is assumed to raise its own exception, as Prefect's does. Within the
    block, a Ctrl-C that arrives twice within SAME_STOP_SECONDS counts once. Has no effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _interrupted_once(), _raising_at_sigterm():
        yield


@contextmanager
def _interrupted_once() -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    last = -SAME_STOP_SECONDS

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SAME_STOP_SECONDS:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _raising_at_sigterm() -> Iterator[None]:
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(_number: int, _frame: object) -> NoReturn:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
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
    """Defer Ctrl-C, SIGTERM and SIGALRM to the end of the block, which must not be interrupted and takes bounded time.

    ``what`` describes the work; it is logged when such a signal arrives. In other threads than the main thread, there
    is nothing to defer: Python handles signals only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)
        _log.warning("%s: please wait", what)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def is_stop(error: BaseException) -> bool:
    """Whether ranks get time to save because of this exception: after SIGTERM or Ctrl-C.

    After a failure they do not, nor after a second signal, which raises an exception while the first one is handled.
    """
    is_second = error.__context__ is not None and not isinstance(error.__context__, Exception)
    return not isinstance(error, Exception) and not is_second


def stopping_line(grace_seconds: float) -> str:
    """Return what to tell the user while ranks save."""
    return (
        f"stopping: ranks have {grace_seconds:.0f} s to finish the step, and then save and end. Another Ctrl-C ends "
        "them at once, without a checkpoint"
    )
