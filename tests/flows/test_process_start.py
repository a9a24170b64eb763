"""A server has all the time that it needs to start while it works, and an error shows what it printed."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.process_start import await_start
from infra.node.processes import Activity
from t5train.errors import LaunchError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, of which every look takes 100."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda _: now.__setitem__(0, now[0] + 100))
    return now


@contextmanager
def started(path: Path, code: str = "import time; time.sleep(60)") -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    with open(path, "ab") as output, subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output) as it:
        with open(path, "rb") as log:
            yield it, log
        it.kill()


def ready_after(looks: int) -> Any:
    left = itertools.count()
    return lambda: next(left) >= looks


@pytest.mark.parametrize("works", ["with its CPU", "by printing"])
def test_a_process_that_works_is_waited_for_without_a_limit(
    works: str, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, ticks = tmp_path / "log", itertools.count(step=6 * os.sysconf("SC_CLK_TCK"))  # 6% of a core

    def activity(_: int) -> Activity:
        if works == "by printing":
            with open(log, "ab") as output:
                output.write(b"migrated\n")
        return Activity("R", next(ticks) if works == "with its CPU" else 0)

    monkeypatch.setattr("infra.node.processes.activity", activity)
    with started(log) as (process, output):
        await_start(process, "it", ready_after(100), output)
    assert clock[0] == 100 * 100


@pytest.mark.parametrize("share", [0, 4])
def test_a_process_that_does_next_to_nothing_hangs(
    share: int, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(7, share * os.sysconf("SC_CLK_TCK"))
    monkeypatch.setattr("infra.node.processes.activity", lambda _: Activity("D", next(ticks)))
    said = r"it has printed nothing and used less than 5% of a core for 600 s: it printed nothing\. Check that its disk"
    with started(tmp_path / "log") as (process, output), pytest.raises(LaunchError, match=said):
        await_start(process, "it", ready_after(100), output)
    assert clock[0] == 700


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("exit(3)", "it ended with exit code 3: it printed nothing. Correct the cause"),
        ("exit('no such table')", "it ended with exit code 1: no such table. Correct the cause"),
        ("print(1)\nprint()\nexit('two')", "it ended with exit code 1:\n1\ntwo\nCorrect the cause"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "it was killed with SIGKILL: it printed nothing. If the machine has run out",
        ),
        ("import os; os.kill(os.getpid(), 15)", "it was ended by SIGTERM: it printed nothing. Correct the cause"),
    ],
)
def test_the_error_of_a_process_that_ends_shows_what_this_process_printed(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "log").write_text("of the server before\n")
    begin = (tmp_path / "log").stat().st_size
    with started(tmp_path / "log", code) as (process, output), pytest.raises(LaunchError) as failed:
        await_start(process, "it", lambda: False, output, begin)
    assert str(failed.value).startswith(said)


def test_only_the_last_lines_are_shown(tmp_path: Path) -> None:
    code = "[print(number) for number in range(1000)]; exit(1)"
    with started(tmp_path / "log", code) as (process, output), pytest.raises(LaunchError) as failed:
        await_start(process, "it", lambda: False, output)
    assert str(failed.value).splitlines()[1:-1] == [str(number) for number in range(990, 1000)]


def test_the_time_is_reported_while_the_process_starts(tmp_path: Path, clock: list[float]) -> None:
    reported: list[float] = []
    with started(tmp_path / "log") as (process, output):
        await_start(process, "it", ready_after(3), output, 0, reported.append)
    assert reported == [0.0, 100.0, 200.0]
