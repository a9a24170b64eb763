"""The library's lines in the run's log are limited in rate and have no needless tracebacks."""

import logging
import sys

import pytest

from t5train.errors import SpecError
from tasks.prefect_log import BURST_LINES, RunLogHandler, as_encodable, without_traceback


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
