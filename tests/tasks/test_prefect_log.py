"""The library's lines in the run's log are limited in rate and have no needless tracebacks."""

import io
import logging
import sys

import pytest

from t5train.errors import SpecError
from tasks.prefect_log import (
    BURST_LINES,
    REPEATED_AT_THE_END,
    RunLogHandler,
    as_encodable,
    as_stop,
    show_failures_briefly,
    without_traceback,
)


@pytest.fixture
def handler_and_log(caplog: pytest.LogCaptureFixture) -> tuple[RunLogHandler, pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO)
    return RunLogHandler(logging.getLogger("heard")), caplog


def record(level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("t5train.x", level, __file__, 1, message, (), None)


def test_log_lines_beyond_the_rate_limit_are_dropped_and_counted(
    handler_and_log: tuple[RunLogHandler, pytest.LogCaptureFixture],
) -> None:
    handler, caplog = handler_and_log
    for number in range(10_000):
        handler.emit(record(logging.INFO, f"line {number}"))
    assert BURST_LINES <= len(caplog.records) <= BURST_LINES + 5
    passed = len(caplog.records)
    handler.emit(record(logging.WARNING, "mind"))
    assert caplog.records[-1].getMessage().startswith("mind")
    assert f"({10_000 - passed:,} lines left out before this one)" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("signal", ["an interrupt", "a termination"])
def test_a_run_that_was_stopped_or_cancelled_is_not_called_crashed(signal: str) -> None:
    def line(message: str) -> logging.LogRecord:
        return logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, message, (), None)

    stopped = line(f"Crash detected! Execution was aborted by {signal} signal.")
    assert as_stop(stopped)
    assert stopped.getMessage() == "Ended by a signal, because the run was stopped or cancelled"
    assert stopped.levelno == logging.WARNING
    assert not as_stop(line(f"Finished in state Crashed('Execution was aborted by {signal} signal.')"))
    crashed = line("Crash detected! Execution was interrupted by an unexpected exception: Boom")
    assert as_stop(crashed)
    assert (crashed.levelno, crashed.getMessage()[:14]) == (logging.ERROR, "Crash detected")


def test_only_unexpected_errors_keep_their_traceback() -> None:
    for error, kept in ((SpecError("no such setting"), False), (KeyError("defect"), True)):
        try:
            raise error
        except (SpecError, KeyError):
            line = logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
        assert without_traceback(line)
        assert bool(line.exc_info) == kept


def test_lines_with_bytes_that_are_not_utf8_can_be_sent() -> None:
    error = ValueError("caf\udce9.txt")
    because = (ValueError, error, None)
    line = logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, "%s", ("a\udce9",), because)
    assert as_encodable(line)
    shown = logging.Formatter().format(line)
    assert shown == "a\\udce9\nValueError: caf\\udce9.txt"


def test_a_terminal_says_where_a_run_failed_and_leaves_the_error_to_the_end_and_others_get_all_lines() -> None:
    terminal, others = (logging.StreamHandler(io.StringIO()) for _ in range(2))
    log, of_flow = logging.Logger("prefect.task_runs"), logging.Logger("prefect.flow_runs")
    for each in (log, of_flow):
        each.addHandler(terminal)
        each.addHandler(others)
    show_failures_briefly(terminal)
    log.info("Task run failed with exception: %r - Retry 1/3 will start immediately", OSError("first"))
    log.error("Task run failed with exception: OSError('second') - Retries are exhausted", exc_info=OSError("second"))
    log.error("Finished in state Failed('Task run encountered an exception OSError: second')")
    of_flow.error("Train failed: second", extra=REPEATED_AT_THE_END)
    of_flow.info("Finished in state Failed('Train failed: second')")
    log.error("another error")
    assert terminal.stream.getvalue().splitlines() == [
        "Task run failed with exception: OSError('first') - Retry 1/3 will start immediately",
        "Failed: the error is at the end",
        "another error",
    ]
    assert others.stream.getvalue().count("second") == 5  # one of them in the traceback
