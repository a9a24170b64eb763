"""What is said when a command is interrupted: what a run resumes from, and the command that continues."""

import logging
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.cli.terminal import complain
from infra.head.launch.start_record import PROGRAM
from infra.head.runs.run_state import what_is_saved
from t5train.records.locations import redacted

_BEGIN_AGAIN = "--begin-again"
_CRASH = re.compile(
    r"(Crash detected! |Finished in state Crashed\(').*Execution was aborted by an? (interrupt|termination) signal"
)


def interrupt_on_stop() -> None:
    """Let a service manager's SIGTERM and a closed terminal's SIGHUP act like Ctrl-C, unless ignored (nohup)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def explaining_interruption(run_folder: Path, num_steps: int) -> Iterator[None]:
    """If Ctrl-C or SIGTERM ends the block, say what was saved and how to continue."""
    try:
        with _without_prefects_words():
            yield
    except BaseException as error:
        if not isinstance(error, Exception):  # a signal, not a failure
            complain(what_is_saved(run_folder, num_steps))
            complain(f"to continue: {typed_command()}")
        raise


@contextmanager
def naming_command_to_continue() -> Iterator[None]:
    """If Ctrl-C ends the block, say that the same command continues. A URL that may hold a secret is not printed."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            is_printable = all(word == redacted(word) for word in sys.argv[1:])
            complain(f"to continue: {typed_command() if is_printable else 'repeat the same command'}")
        raise


@contextmanager
def _without_prefects_words() -> Iterator[None]:
    """Drop the log lines in which Prefect calls an interruption a crash."""
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    for logger in loggers:
        logger.addFilter(_is_no_crash)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_no_crash)


def _is_no_crash(record: logging.LogRecord) -> bool:
    return not _CRASH.match(record.getMessage())


def typed_command(*added: str) -> str:
    """Return this command as it was typed with ``added`` words, but without the option that gives up the checkpoint."""
    program = sys.argv[0] if Path(sys.argv[0]).name == PROGRAM and shutil.which(PROGRAM) is None else PROGRAM
    return shlex.join([program, *(each for each in sys.argv[1:] if each != _BEGIN_AGAIN), *added])
