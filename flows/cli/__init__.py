"""The command line: a module for each command or group of commands, options, and terminal output.

Not here: code that flows import (``flows``), and what a stage does (``t5train``).
"""

import os
import signal
from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Import the commands and run one; this is the console script.

    Importing takes seconds. Nothing has begun by then, so Ctrl-C ends the process at once, without a traceback.
    """
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in a shell's background job
    before = signal.SIG_IGN if is_ignored else signal.signal(signal.SIGINT, _end_at_once)
    from flows.cli import __main__

    signal.signal(signal.SIGINT, before)
    __main__.main()


def _end_at_once(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)
