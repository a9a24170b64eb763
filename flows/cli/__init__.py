"""The command line: a module for each command or group of commands, options, and terminal output.

Not here: code that flows import (``flows``), and what a stage does (``t5train``).
"""

from typing import NoReturn

from flows.cli.early_interruption import ending_at_once, ending_when_interrupted


def main() -> NoReturn:
    """Import the command line and run a command; this is the console script."""
    with ending_at_once():
        from flows.cli import __main__
    with ending_when_interrupted():
        __main__.main()
