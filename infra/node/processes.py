"""Finds, identifies and ends processes of this machine, such that a reused pid is never mistaken for an old process.

Also identifies the machine itself. Reads /proc and uses pidfds (Linux 5.3). Standard library only, as the guards import
it.
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
    """The unique identity of a process: its pid, and its start time in clock ticks after boot."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that currently has ``pid``. Raises ProcessLookupError if there is none."""
        return cls(pid, _stat(pid).start_time)

    def open(self) -> int | None:
        """Return a pidfd that becomes readable when the process ends; None if it has already ended.

        The descriptor is opened before the start time is compared, so it certainly refers to that process.
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
        """Whether this process is still running. A zombie is not."""
        return _is_running(self.pid, lambda stat: stat.start_time == self.start_time)

    def send(self, number: int) -> None:
        """Send the process a signal if it is still running."""
        if (descriptor := self.open()) is None:
            return
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Survivors:
    """Pids of processes that are still alive after SIGKILL."""

    pids: tuple[int, ...]


Belongs = Callable[[int], bool]
"""A predicate on a pid that selects processes."""


def in_session(session: int) -> Belongs:
    """Select the running processes of a session, in any process group: ninja gives each compiler one of its own."""
    return lambda pid: _is_running(pid, lambda stat: stat.session == session)


def in_run(run_id: str) -> Belongs:
    """Select processes with ``run_id`` in their environment, which descendants inherit in any process group."""
    return lambda pid: variable(pid, RUN_ID_VARIABLE) == run_id


def variable(pid: int, name: str) -> str:
    """A variable of the environment with which a process of this user was started; empty if it is not set."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # it has ended, or belongs to another user, so it is not of our run
    values = (entry.removeprefix(start) for entry in entries if entry.startswith(start := f"{name}=".encode()))
    return os.fsdecode(next(values, b""))


def child_of(parent: int) -> Belongs:
    """Select the running children of a process."""
    return lambda pid: _is_running(pid, lambda stat: stat.parent == parent)


def given(argument: str) -> Belongs:
    """Select this user's processes that have ``argument`` as one of their arguments."""
    user = os.getuid()

    def belongs(pid: int) -> bool:
        try:
            return argument in arguments(pid) and Path(f"/proc/{pid}").stat().st_uid == user
        except FileNotFoundError:
            return False  # it has ended

    return belongs


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return [os.fsdecode(each) for each in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def find(belongs: Belongs) -> set[int]:
    """Pids of the selected processes."""
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return {pid for pid in pids if belongs(pid)}


def end(belongs: Belongs, grace_seconds: float) -> set[int]:
    """Send SIGTERM to the selected processes, and SIGKILL to those that are left after ``grace_seconds``.

    Both signals also go to processes that start meanwhile. With ``grace_seconds=0``, only SIGKILL is sent. Returns the
    pids still alive five seconds after SIGKILL (blocked in the kernel by a dead disk or driver).
    """
    alive = _signal_until_gone(belongs, signal.SIGTERM, grace_seconds)
    return _signal_until_gone(belongs, signal.SIGKILL, _KILL_SECONDS) if alive else alive


def await_end(belongs: Belongs, seconds: float) -> None:
    """Wait until no selected process is left, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while find(belongs) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended since this machine started."""
    lines = Path("/proc/vmstat").read_text("ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process signal ``number`` when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def boot_id() -> str:
    """An id that changes each time this machine starts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


@dataclass(frozen=True)
class Activity:
    """The state of a process, as in /proc, and the CPU time that it has used, in clock ticks."""

    state: str
    cpu_ticks: int


def activity(pid: int) -> Activity:
    """The activity of the process that currently has ``pid``. Raises ProcessLookupError if there is none."""
    stat = _stat(pid)
    return Activity(stat.state, stat.cpu_ticks)


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    session: int
    cpu_ticks: int
    start_time: int


def _is_running(pid: int, belongs: Callable[[_Stat], bool]) -> bool:
    """Whether a process is running and satisfies ``belongs``. A zombie is not running."""
    try:
        stat = _stat(pid)
    except ProcessLookupError:
        return False
    return belongs(stat) and stat.state not in "ZX"


def _stat(pid: int) -> _Stat:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    fields = text.rpartition(")")[2].split()  # the program's name before it may contain spaces and brackets
    cpu_ticks = int(fields[11]) + int(fields[12])
    return _Stat(
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=cpu_ticks,
        start_time=int(fields[19]),
    )


def _signal_until_gone(belongs: Belongs, number: int, seconds: float) -> set[int]:
    deadline, signalled = time.monotonic() + seconds, set[int]()
    while (alive := find(belongs)) and time.monotonic() < deadline:
        for pid in alive - signalled:
            _send(pid, number, belongs)
        signalled |= alive
        time.sleep(_LOOK_SECONDS)
    return alive


def _send(pid: int, number: int, belongs: Belongs) -> None:
    """Send a signal to a selected process.

    The process is checked after its pidfd is opened, so the signal cannot reach another process with that pid.
    """
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


_MACHINE = Path("/etc/machine-id")
_NETWORK = Path("/proc/self/ns/net")


def identity() -> str:
    """This machine's boot id, machine id and network namespace. Two names of one machine have all three in common.

    Containers with separate networks count as separate machines: the rendezvous and its port belong to a network.
    """
    machine = _MACHINE.read_text("ascii").strip() if _MACHINE.exists() else ""
    return f"{boot_id()} {machine} {_NETWORK.readlink()}"
