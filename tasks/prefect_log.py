"""Forwards the library's log lines to Prefect's log of the run, and shortens what a terminal shows of that log."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from t5train.errors import T5TrainError, encodable
from t5train.quantities import quantity

LIBRARY_LOGGERS = ("t5train", "infra", "tasks")
LINES_A_SECOND = 1.0
BURST_LINES = 20.0

_TASK_RUNS = "prefect.task_runs"
_TRACEBACKS = logging.Formatter()
_STOP = re.compile("Execution was aborted by an? (interrupt|termination) signal")
RunLogger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class RunLogHandler(logging.Handler):
    """Forwards records to the log of the task or flow run, at a limited rate.

    Forwarding a line takes about a millisecond in this process, and longer on the server. After a burst of 20 lines, at
    most one line per second is forwarded. The others are dropped, and the next forwarded line says how many. Warnings
    and errors are always forwarded.
    """

    def __init__(self, flow_logger: RunLogger) -> None:
        super().__init__(logging.INFO)
        self._flow_logger = flow_logger
        self._allowance = BURST_LINES
        self._counted_at = time.monotonic()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Forward the record, or drop and count it if the rate limit is reached."""
        if record.levelno < logging.WARNING and not self._allowed():
            self._left_out += 1
            return
        left_out = f" ({quantity(self._left_out, 'line')} left out before this one)" if self._left_out else ""
        self._left_out = 0
        self._run_logger().log(record.levelno, "%s%s", record.getMessage(), left_out)

    def _allowed(self) -> bool:
        now = time.monotonic()
        self._allowance = min(BURST_LINES, self._allowance + (now - self._counted_at) * LINES_A_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _run_logger(self) -> RunLogger:
        try:
            return get_run_logger()
        except MissingContextError:  # in a thread that the library started
            return self._flow_logger


@contextmanager
def library_log() -> Iterator[None]:
    """Within the block, forward the library's log lines of level INFO and above to the log of the current flow run."""
    handler = RunLogHandler(get_run_logger())
    loggers = [logging.getLogger(name) for name in LIBRARY_LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the run's log is already shown on the console
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def without_traceback(record: logging.LogRecord) -> bool:
    """A log filter that removes the traceback of a T5TrainError, whose message is explanation enough."""
    if record.exc_info and isinstance(record.exc_info[1], T5TrainError):
        record.exc_info = None
    return True


def as_encodable(record: logging.LogRecord) -> bool:
    """A log filter that shows bytes which are not UTF-8 as escapes.

    Otherwise Prefect sends neither the line nor the others that it sends with it.
    """
    try:
        record.msg, record.args = encodable(record.getMessage()), None
    except (TypeError, ValueError):  # the line's arguments do not fit it: handlers report that, and filters must not
        return True
    if record.exc_info:
        record.exc_text = encodable(_TRACEBACKS.formatException(record.exc_info))  # which handlers do not format again
    return True


def is_stop(message: str) -> bool:
    """Return whether Prefect says in these words that Ctrl-C or SIGTERM ended a run. It calls this a crash."""
    return bool(_STOP.search(message))


def as_stop(record: logging.LogRecord) -> bool:
    """A log filter that does not let Prefect call it a crash that a run was stopped or cancelled."""
    if is_stop(said := str(record.msg)):
        if not said.startswith("Crash detected!"):
            return False  # the final state, after the line that says what was saved
        record.msg, record.args = "Ended by a signal, because the run was stopped or cancelled", None
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return True


REPEATED_AT_THE_END = {"is_repeated_at_the_end": True}
"""Marks a log line whose text the program prints again at its end."""


def show_failures_briefly(handler: logging.Handler) -> None:
    """Make a handler show only that a stage failed, for a program that prints the error itself at its end.

    Otherwise the same error appears in four lines of Prefect's log. Other handlers still get them.
    """
    handler.addFilter(_is_news)
    handler.setFormatter(_BriefFailures(handler.formatter or logging.Formatter()))


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line does not repeat the error. That on the final state of a task stays: it says which one failed."""
    if hasattr(record, "is_repeated_at_the_end") or (_is_end(record) and record.name != _TASK_RUNS):
        return False
    return not (record.levelno == logging.ERROR and record.getMessage().startswith("Task run failed with "))


def _is_end(record: logging.LogRecord) -> bool:
    return record.getMessage().startswith("Finished in state Failed(")


class _BriefFailures(logging.Formatter):
    """Replaces the error in the final state of a task. One after which it is retried is shown in full."""

    def __init__(self, others: logging.Formatter) -> None:
        super().__init__()
        self._others = others

    def format(self, record: logging.LogRecord) -> str:
        """Return the line as the other formatter writes it."""
        if _is_end(record):
            record = copy(record)  # other handlers get the same one
            record.msg, record.args = "Failed: the error is at the end", None
        return self._others.format(record)


def prepare_run_logs() -> None:
    """Install the filters on the loggers of Prefect's engine and of runs. Repeated calls have no effect."""
    for name in ("prefect.flow_runs", _TASK_RUNS):
        for each in (without_traceback, as_encodable, as_stop):
            logging.getLogger(name).addFilter(each)
