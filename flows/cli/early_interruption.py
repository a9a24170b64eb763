"""Ctrl-C before a command has begun, while modules are imported, and after it has ended: the process ends at once.

Python itself would take seconds to free what torch has loaded.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


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
    os._exit(INTERRUPTED)


@contextmanager
def ending_when_interrupted() -> Iterator[None]:
    """Let the process end as soon as the command in the block was interrupted, and has cleaned up.

    Not with Prefect, which sends its log when Python ends.
    """
    try:
        yield
    except KeyboardInterrupt:  # another one, while the first was handled
        _end()
    except SystemExit as ended:
        if ended.code == INTERRUPTED and "prefect" not in sys.modules:
            os._exit(INTERRUPTED)
        raise
