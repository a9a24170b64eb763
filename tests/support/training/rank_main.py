"""The end of a test's rank."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run(main: Callable[[Path], None]) -> NoReturn:
    """Run a program for the file that the command line names, and end this process at once.

    While an interpreter ends, torch's threads sometimes abort the process, whose results are written by then.
    """
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
