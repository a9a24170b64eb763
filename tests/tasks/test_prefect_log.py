"""Library lines in the run's log: bounded, and without needless tracebacks."""

import logging
import sys

import pytest

from t5train.errors import SpecError
from tasks.prefect_log import BURST_LINES, RunLogHandler, without_traceback


@pytest.fixture
def reply(caplog: pytest.LogCaptureFixture) -> tuple[RunLogHandler, pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO)
    return RunLogHandler(logging.getLogger("heard")), caplog


def record(level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("t5train.x", level, __file__, 1, message, (), None)


def test_a_flood_of_lines_is_cut_and_counted(reply: tuple[RunLogHandler, pytest.LogCaptureFixture]) -> None:
    handler, caplog = reply
    for number in range(10_000):
        handler.emit(record(logging.INFO, f"line {number}"))
    assert BURST_LINES <= len(caplog.records) <= BURST_LINES + 5
    passed = len(caplog.records)
    handler.emit(record(logging.WARNING, "mind"))
    assert caplog.records[-1].getMessage().startswith("mind")
    assert f"({10_000 - passed} lines before this one are left out)" in caplog.records[-1].getMessage()


def test_an_error_raised_on_purpose_has_no_traceback_and_a_defect_has_one() -> None:
    for error, kept in ((SpecError("no such setting"), False), (KeyError("defect"), True)):
        try:
            raise error
        except (SpecError, KeyError):
            line = logging.LogRecord("prefect.flow_runs", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
        assert without_traceback(line)
        assert bool(line.exc_info) == kept
