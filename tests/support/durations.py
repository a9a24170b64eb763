"""A pytest plugin that measures tests: it shows the slowest files, and records every test for test-durations.md.

CPU seconds are those of the worker and of child processes that ended during the test or its fixtures. They include what
the worker did between the last test and this one.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_SHOWN_FILES, _SHOWN_SECONDS = 40, 3.0
_CPU = "cpu"
"""The property of a test's reports that has a phase's CPU seconds; pytest-xdist takes it to the main process."""


class _CpuClock:
    """CPU seconds of this process and of its children that have ended."""

    def __init__(self) -> None:
        self._used = 0.0

    def lap(self) -> float:
        """Return the CPU seconds since the last call."""
        before, self._used = self._used, sum(os.times()[:4])
        return self._used - before


_clock = _CpuClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", type=Path, metavar="FILE", help="add a line of JSON for each test to a file")


def pytest_collection_finish() -> None:
    _clock.lap()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU seconds of a phase to its report."""
    report = yield
    report.user_properties.append((_CPU, _clock.lap()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the files that took longest, fixtures included, and record all tests if that is asked for."""
    tests = _measured(terminalreporter)
    files = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for name, took in tests.items():
        for position, seconds in enumerate(took):
            files[name.partition("::")[0]][position] += seconds
    if slowest := sorted((took, file) for file, took in files.items() if took[0] > _SHOWN_SECONDS)[-_SHOWN_FILES:]:
        terminalreporter.write_sep("=", "slowest files: seconds, and CPU seconds")
        for (wall, cpu), file in reversed(slowest):
            terminalreporter.write_line(f"{wall:7.1f} {cpu:7.1f}  {file}")
    if (record := config.getoption("--record-durations")) is not None:
        with record.open("a", encoding="utf-8") as lines:
            for name, (wall, cpu) in tests.items():
                lines.write(json.dumps({"test": name, "seconds": round(wall, 2), "cpu": round(cpu, 2)}) + "\n")


def _measured(terminalreporter: pytest.TerminalReporter) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each test that ran, with its setup and teardown."""
    tests = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tests[report.nodeid][0] += report.duration
                tests[report.nodeid][1] += sum(float(value) for name, value in report.user_properties if name == _CPU)
    return tests
