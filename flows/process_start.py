"""Waits until a server process that this program has started is ready, however busy the machine is."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from infra.node import processes
from t5train.errors import LaunchError

HANG_SECONDS = 600.0
"""A process that prints nothing for so long, and uses next to no CPU time, hangs."""

WORKING_SHARE = 0.05
"""The share of a core that a process which works uses at least: one that waits for something in a loop uses less."""

_LOOK_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_LAST_LINES = 10


def await_start(
    process: subprocess.Popen[bytes],
    name: str,
    is_ready: Callable[[], bool],
    output: IO[bytes],
    begin: int = 0,
    report: Callable[[float], None] = lambda _seconds: None,
    hang_seconds: float = HANG_SECONDS,
) -> None:
    """Wait until ``is_ready`` returns True. There is no limit while the process works.

    Args:
        process: The process, a child of this one.
        name: What errors call the process.
        is_ready: Whether the process is ready.
        output: The file to which the process writes its output, open for reading.
        begin: Where the output of this process begins in the file, in bytes.
        report: Called with the seconds since the call, again and again.
        hang_seconds: How long the process may print nothing and use less than 5% of a core.

    Raises:
        LaunchError: The process ended or hangs. The error shows its last lines.

    """
    started = worked_at = time.monotonic()
    cpu_seconds, printed = 0.0, begin
    while not is_ready():
        now = time.monotonic()
        if process.poll() is not None:
            raise LaunchError(failure(process, name, output, begin))
        with suppress(ProcessLookupError):  # it has just ended: the next look says how
            used, size = processes.activity(process.pid).cpu_ticks / _TICKS, os.fstat(output.fileno()).st_size
            if size != printed or used - cpu_seconds >= WORKING_SHARE * hang_seconds:
                cpu_seconds, printed, worked_at = used, size, now
        if now - worked_at > hang_seconds:
            raise LaunchError(failure(process, name, output, begin, hang_seconds))
        report(now - started)
        time.sleep(_LOOK_SECONDS)


def failure(
    process: subprocess.Popen[bytes], name: str, output: IO[bytes], begin: int = 0, hang_seconds: float = HANG_SECONDS
) -> str:
    """Return why a process has ended, or that it hangs; its last lines; and what to do. The arguments are as above."""
    code = process.poll()
    if code is None:
        how = f"has printed nothing and used less than {WORKING_SHARE:.0%} of a core for {hang_seconds:.0f} s"
        remedy = "Check that its disk responds, and start it again"
    elif code == -signal.SIGKILL:
        how = "was killed with SIGKILL"
        remedy = "If the machine has run out of memory (see `dmesg`), free some, and start it again"
    else:
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        remedy = "Correct the cause, and start it again"
    text = os.pread(output.fileno(), os.fstat(output.fileno()).st_size, begin).decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-_LAST_LINES:] or ["it printed nothing"]
    return "\n".join([f"{name} {how}:", *lines, remedy]) if lines[1:] else f"{name} {how}: {lines[0]}. {remedy}"
