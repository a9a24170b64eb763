"""Processes of this machine, named so that a reused pid can never stand for one that is gone; and which machine it is.

Reads /proc and uses pidfds (Linux 5.3). Standard library only, as the guards import it.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

RUN_ID_VARIABLE = "T5_RUN_ID"
"""Every process of an attempt carries its run id in this environment variable."""
_PR_SET_PDEATHSIG = 1
_KILL_SECONDS = 5.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class ProcessIdentity:
    """A process for good: its pid, and the clock ticks after boot at which it started."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has ``pid`` now. Raises ProcessLookupError if there is none."""
        return cls(pid, _stat(pid).start_time)

    def open(self) -> int | None:
        """A pidfd, readable once the process has ended; None if it has already.

        The descriptor is opened before the start time is compared, so it is surely of that process.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.is_alive():
            return descriptor
        os.close(descriptor)
        return None

    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        try:
            stat = _stat(self.pid)
        except ProcessLookupError:
            return False
        return stat.start_time == self.start_time and stat.state not in "ZX"

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if (descriptor := self.open()) is None:
            return
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)


Belongs = Callable[[int], bool]
"""Tells by its pid whether a process is one of those that are meant."""


def in_group(group: int) -> Belongs:
    """Processes of a process group that still run."""

    def belongs(pid: int) -> bool:
        try:
            stat = _stat(pid)
        except ProcessLookupError:
            return False
        return stat.group == group and stat.state not in "ZX"

    return belongs


def in_run(run_id: str) -> Belongs:
    """Processes whose environment carries ``run_id``; descendants do, whatever group they moved to."""
    return lambda pid: variable(pid, RUN_ID_VARIABLE) == run_id


def variable(pid: int, name: str) -> str:
    """Of the environment that a process of this user was started with; empty where there is none."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # ended meanwhile, or another user's, which no run's are
    values = (entry.removeprefix(start) for entry in entries if entry.startswith(start := f"{name}=".encode()))
    return os.fsdecode(next(values, b""))


def child_of(parent: int) -> Belongs:
    """Processes that a process started itself and that still run."""

    def belongs(pid: int) -> bool:
        try:
            stat = _stat(pid)
        except ProcessLookupError:
            return False
        return stat.parent == parent and stat.state not in "ZX"

    return belongs


def given(argument: str) -> Belongs:
    """This user's processes that have ``argument``, exactly, on their command line."""
    entry, user = argument.encode(), os.getuid()

    def belongs(pid: int) -> bool:
        folder = Path(f"/proc/{pid}")
        try:
            return entry in (folder / "cmdline").read_bytes().split(b"\0") and folder.stat().st_uid == user
        except (FileNotFoundError, ProcessLookupError):
            return False  # ended meanwhile

    return belongs


def find(belongs: Belongs) -> set[int]:
    """Pids of the processes that are meant."""
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return {pid for pid in pids if belongs(pid)}


def end(belongs: Belongs, grace_seconds: float) -> set[int]:
    """SIGTERM every process that is meant, after ``grace_seconds`` SIGKILL; those started meanwhile too.

    Returns the pids that outlived even that for five seconds (in the kernel, on a dead disk or driver).
    """
    alive = _signal_until_gone(belongs, signal.SIGTERM, grace_seconds)
    return _signal_until_gone(belongs, signal.SIGKILL, _KILL_SECONDS) if alive else alive


def await_end(belongs: Belongs, seconds: float) -> None:
    """Wait until none of the processes that are meant is there any more, but no longer than that."""
    deadline = time.monotonic() + seconds
    while find(belongs) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since this machine started."""
    lines = Path("/proc/vmstat").read_text("ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process signal ``number`` when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def boot_id() -> str:
    """Another one each time this machine starts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


@dataclass(frozen=True)
class Activity:
    """What the kernel says a process does: ``state`` as in /proc, and the clock ticks that it has computed for."""

    state: str
    cpu_ticks: int


def activity(pid: int) -> Activity:
    """Of the process that has ``pid`` now. Raises ProcessLookupError if there is none."""
    stat = _stat(pid)
    return Activity(stat.state, stat.cpu_ticks)


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    group: int
    cpu_ticks: int
    start_time: int


def _stat(pid: int) -> _Stat:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    fields = text.rpartition(")")[2].split()  # the program's name before it may hold spaces and brackets
    cpu_ticks = int(fields[11]) + int(fields[12])
    return _Stat(
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=cpu_ticks,
        start_time=int(fields[19]),
    )


def _signal_until_gone(belongs: Belongs, number: int, seconds: float) -> set[int]:
    deadline, told = time.monotonic() + seconds, set[int]()
    while (alive := find(belongs)) and time.monotonic() < deadline:
        for pid in alive - told:
            _send(pid, number, belongs)
        told |= alive
        time.sleep(_LOOK_SECONDS)
    return alive


def _send(pid: int, number: int, belongs: Belongs) -> None:
    """The pidfd holds the process, and only then is it asked for: the signal cannot reach a stranger."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if belongs(pid):
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


_BOOT, _MACHINE = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")
_NETWORK = Path("/proc/self/ns/net")


def identity() -> str:
    """Boot, machine and network namespace: two names of one machine have all three in common.

    Containers with networks of their own are machines of their own: ranks meet, and ports are taken, in a network.
    """
    machine = _MACHINE.read_text("ascii").strip() if _MACHINE.exists() else ""
    return f"{_BOOT.read_text('ascii').strip()} {machine} {_NETWORK.readlink()}"
