"""A pytest plugin that measures tests: it shows the slowest files, and records every test for docs/test-durations.md.

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
_used = 0.0
"""CPU seconds that this worker and its children had used at the end of the last phase of a test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", type=Path, metavar="FILE", help="add a line of JSON for each test to a file")


def pytest_collection_finish() -> None:
    global _used  # noqa: PLW0603  # pytest's hooks are functions of a module
    _used = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU seconds of a phase to its report, as ``cpu``; pytest-xdist takes them to the main process."""
    global _used  # noqa: PLW0603
    report = yield
    used = sum(os.times()[:4])
    report.cpu = used - _used  # type: ignore[attr-defined]
    _used = used
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
                tests[report.nodeid][1] += getattr(report, "cpu", 0.0)
    return tests
