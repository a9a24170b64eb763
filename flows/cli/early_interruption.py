"""Ctrl-C while modules are imported, which takes seconds: nothing has begun, so the process ends at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process within the block, without a traceback. What ignored it before still does."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in a shell's background job
    before = signal.SIG_IGN if is_ignored else signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)
