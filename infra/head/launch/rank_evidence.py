"""Evidence of why an attempt failed, from the files that its launcher, its ranks and their guards left."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from infra.head.hosts.ssh import remedy_of_launcher
from infra.head.launch.verdict import Evidence, Hops
from infra.node.attempts import guard_failure
from infra.node.attempts.attempt import LAUNCHER, Attempt, rank_name
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.attempts.log_tail import shown_lines
from infra.node.attempts.rank_environment import redact
from infra.node.attempts.shared_memory import REMEDY, SEGMENTS, FreeSpace
from infra.node.attempts.watchdog import STOP_REQUESTED
from infra.node.node_folders import attempt_folder
from t5train.errors import (
    CollectiveTimeout,
    DiskFailed,
    DiskFull,
    HostLost,
    LaunchError,
    OutOfMemory,
    Preempted,
    RankKilled,
    RankStopped,
    StorageError,
    T5TrainError,
)
from t5train.files import error_report
from t5train.files.atomic import try_writing
from t5train.files.os_errors import of_rank
from t5train.files.run_folder import ATTEMPT_SPEC

_SIGKILL, _SIGBUS, _SIGSEGV, _SIGABRT = -9, -7, -11, -6
_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class Diagnosis:
    """The class of the error to raise, and advice for its message."""

    kind: type[LaunchError]
    advice: str
    hops: Hops = Hops.OWN


_HOST_MEMORY = Diagnosis(
    OutOfMemory,
    "the host has too little memory. Use fewer ranks per host, move less to the host's memory (layout.offload), or end "
    "other programs there that use much of it",
)
_WAITED = Diagnosis(
    CollectiveTimeout,
    "the rank timed out in a collective. Check the output of the other ranks for one that hangs; if none does, suspect "
    "the network",
    Hops.WAITED,
)
_BY_CAUSE = {
    Cause.HEAD: Diagnosis(
        HostLost,
        "the network between the head and this host, or the head itself, was down for longer than "
        "cluster.lease_seconds. Repair the network, or raise cluster.lease_seconds",
        Hops.LOST,
    ),
    Cause.REQUESTED: Diagnosis(
        Preempted,
        "the rank saved no checkpoint. The same command continues from the last one, or begins at step 0 without one",
        Hops.PREEMPTED,
    ),
    Cause.PARENT: Diagnosis(
        LaunchError,
        "DeepSpeed's launcher on its host was killed. Check there what killed it, such as the OOM killer (`dmesg`)",
        Hops.PARENT,
    ),
    Cause.BEAT: Diagnosis(
        RankStopped,
        "check whether somebody stopped it (SIGSTOP, a debugger). If not, the end of its output shows what it did last",
    ),
    Cause.PHASE: Diagnosis(
        RankStopped,
        "the rank hung after the last line of its output. If it was only slow, raise cluster.deadlines for that phase",
        Hops.DEADLINE,
    ),
    Cause.SAVE: Diagnosis(
        RankStopped,
        "check the disk that it wrote to. If that was only slow, raise cluster.deadlines.save_seconds",
        Hops.DEADLINE,
    ),
}
_DISK_FULL = Diagnosis(
    DiskFull,
    "the rank's disk is full. Free some space at the path that the output names (remove files if it lacks inodes, as "
    "`df -i` shows), or choose another storage.root (or storage.scratch, if hosts have their own disks)",
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
# Matched with the last lines of a rank's log; the most specific come first.
_BY_WORDS: tuple[tuple[re.Pattern[str], Diagnosis], ...] = (
    (_NO_SPACE, _DISK_FULL),
    (
        re.compile(r"Read-only file system|Input/output error|Stale file handle"),
        Diagnosis(
            DiskFailed,
            "a disk of its host failed or is read-only. The rank's output names the path. Check `dmesg` there, then "
            "repair and remount the disk, or choose another storage.root or storage.scratch",
        ),
    ),
    (re.compile(r"\[enforce fail at inline_container\.cc"), _DISK_FULL),
    (re.compile(r"\bMemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc"), _HOST_MEMORY),
    (
        re.compile(r"OutOfMemoryError|out of memory|OUT_OF_MEMORY", re.IGNORECASE),
        Diagnosis(
            OutOfMemory,
            "the accelerator has too little memory. Lower layout.micro_batch_sequences, raise layout.zero_stage, set "
            "model.activation_checkpointing or layout.offload, and check that no other program uses it",
        ),
    ),
    (
        re.compile(
            r"collective operation timeout|wait timeout|Timed out waiting \d+ ?ms|[Tt]imed out after \d+ ?(ms|seconds)"
            r"|DistStoreError|Timeout waiting for key"
        ),
        _WAITED,
    ),
    (
        re.compile(
            r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|Socket closed"
            r"|Connection closed by remote peer|ncclRemoteError|Connection was likely closed|ncclSystemError"
            r"|unhandled system error|connectFullMesh failed|failed to recv, got 0 bytes|SO_ERROR: |Read error \["
            r"|returned No route to host"
        ),
        Diagnosis(
            LaunchError,
            "the rank lost its connection to another rank. Check the output of the other ranks for the first failure",
            Hops.LOST_PEER,
        ),
    ),
)
# How NCCL and torch report that /dev/shm is full.
_SHARED_MEMORY = re.compile(rf"{SEGMENTS}|shared memory|No space left on device")
_IN_A_COLLECTIVE = re.compile(r'File "[^"]*(torch/distributed|deepspeed/comm)/')
_IMPORTING = 'File "<frozen importlib'
_STACK = re.compile(r"^ *(?:Current thread|Thread) 0x", re.MULTILINE)


def diagnose(record: ExitRecord, output: str) -> Diagnosis:
    """Diagnose a rank that did not succeed; ``output`` is the end of its log."""
    if record.cause == Cause.PHASE and _waits_for_others(output):
        return _WAITED
    if record.cause == Cause.PHASE and record.reason.startswith("phase 'save'"):
        return _BY_CAUSE[Cause.SAVE]
    if record.cause in _BY_CAUSE:
        return _BY_CAUSE[record.cause]
    if record.returncode is not None and record.returncode < 0:
        return _of_signal(record, output)
    if _SHARED_MEMORY.search(output) and (full := _shared_memory(record)) is not None:
        return full
    # If the disk is full, the rank may have been unable to write that to its output.
    is_full = record.free_bytes is not None and record.free_bytes < _FULL_BYTES
    unknown = _DISK_FULL if is_full else Diagnosis(LaunchError, "", Hops.UNEXPLAINED)
    return next((found for words, found in _BY_WORDS if words.search(output)), unknown)


def _waits_for_others(output: str) -> bool:
    """Whether a thread was in a collective, by the stacks that the rank wrote before it was ended.

    A thread that imports a module of these packages is in one of their files, too.
    """
    return any(_IN_A_COLLECTIVE.search(stack) and _IMPORTING not in stack for stack in _STACK.split(output))


def _of_signal(record: ExitRecord, output: str) -> Diagnosis:
    # An exception in a thread of C++, such as NCCL's when a collective times out, ends the rank with SIGABRT.
    if record.returncode == _SIGABRT:
        unknown = Diagnosis(RankKilled, "", Hops.UNEXPLAINED)
        return next((found for words, found in _BY_WORDS if words.search(output)), unknown)
    if record.returncode == _SIGKILL and record.oom_kills:
        return _HOST_MEMORY
    if record.returncode in (_SIGBUS, _SIGSEGV) and (full := _shared_memory(record)) is not None:
        return full
    if record.returncode == _SIGBUS:
        return Diagnosis(
            RankKilled,
            "the rank used a memory-mapped file that could not grow. Check the free space of /dev/shm and of the "
            "host's disks",
        )
    # A fault in the code ends ranks by signals, too.
    return Diagnosis(RankKilled, "", Hops.OWN if record.returncode == _SIGKILL else Hops.UNEXPLAINED)


def _shared_memory(record: ExitRecord) -> Diagnosis | None:
    """The diagnosis that /dev/shm is full; None if it is not."""
    free, total = record.shared_memory_free_bytes, record.shared_memory_bytes
    if free is None or total is None or free >= _FULL_BYTES:
        return None
    host = record.host or "its host"
    return Diagnosis(DiskFull, f"{SEGMENTS} on {host} is full ({FreeSpace(free, total)}). {REMEDY}")


_TAIL_BYTES = 16 << 10
_TAIL_LINES = 20
_LINES_READ = 200
_SOMETIME = "~"
"""Sorts after all times."""


def evidence_of(
    this: Attempt, num_ranks: int, gone: Collection[str] = (), is_launcher_first: bool = False
) -> list[Evidence]:
    """Return the evidence of the launcher, which is always there, and of each rank that failed.

    Ranks on hosts without an exit record failed if they are among the ``gone``: guards of others may have been ended
    before they could write it. ``is_launcher_first`` if the launcher ended before any rank failed; for an attempt on
    this machine alone, the records show it. Call this after all processes of the attempt have ended and the files of
    its ranks are in its folder.
    """
    ranks = [_Rank(this, rank, num_ranks) for rank in range(num_ranks)]
    # What guards could not write to a file is in the launcher's log.
    of_guards = guard_failure.read(this.log(LAUNCHER))
    found = [rank.evidence(of_guards.get(rank.name), rank.name in gone) for rank in ranks]
    is_launcher_first |= not this.hosts and _launcher_ended_first(this, ranks)
    hops = Hops.LAUNCHER_FIRST if is_launcher_first else Hops.LAUNCHER
    return [*filter(None, found), Evidence(_launcher_failure(this, ranks), hops)]


class _Rank:
    """A rank of an attempt that has ended."""

    def __init__(self, this: Attempt, rank: int, num_ranks: int) -> None:
        self._this, self.name = this, rank_name(rank)
        self.record = this.exit_record(self.name)
        hosts = [host for host, slots in (this.hosts or {}).items() for _ in slots]
        self.hosts = tuple(hosts[rank : rank + 1])
        """Its host; empty for an attempt on this machine alone."""
        self.who = " on ".join((f"rank {rank} of {num_ranks}", *self.hosts))

    def evidence(self, error_of_guard: T5TrainError | None, is_gone: bool) -> Evidence | None:
        """The error that the guard or the rank reported, or else what the exit record and the output show, if any."""
        error = error_of_guard or error_report.read(self._this.rank_files(self.name))
        if error is not None:
            return self._reported(error)
        if self.record is None:
            return self._without_record() if is_gone or (self.has_started and not self.hosts) else None
        return self._diagnosed(self.record) if self._has_failed(self.record) else None

    @property
    def has_started(self) -> bool:
        """Whether the file is here that its guard writes when it starts the rank."""
        return (self._this.folder / f"{self.name}.pid").exists()

    def _reported(self, error: T5TrainError) -> Evidence:
        """For a disk error, the rank, its host and how to exclude that host are added."""
        at = self.record.ended_at if self.record else ""  # first, if its guard could not even record it
        hops = Hops.PREEMPTED if isinstance(error, Preempted) else Hops.OWN
        if not isinstance(error, DiskFull | DiskFailed | StorageError):
            return Evidence(error, hops, at)
        hosts = self._blamed(type(error), str(error))
        remedy = "".join(f". To train without {host}, use --exclude {host}" for host in hosts)
        return Evidence(type(error)(f"{self.who}: {error}{remedy}"), hops, at, hosts)

    def _without_record(self) -> Evidence:
        kind: type[T5TrainError] = RankKilled
        hosts = self.hosts
        what = "was killed together with its guard, which watches it. Check `dmesg` for the OOM killer"
        try:
            try_writing(self._this.folder)
        except OSError as error:
            reason, hosts = of_rank(error), ()
            kind, what = type(reason), f"ended, but its exit record was not written: {reason}"
        return Evidence(kind(f"{self.who} {what}. {self._shown_output()}"), Hops.OWN, _SOMETIME, hosts)

    def _diagnosed(self, record: ExitRecord) -> Evidence:
        output = tail(self._this.log(self.name), _LINES_READ)
        found = diagnose(record, output)
        advice = f": {found.advice}" if found.advice else ""
        error = found.kind(f"{self.who} {record}{advice}. {self._shown_output()}")
        is_own = found.hops in (Hops.OWN, Hops.UNEXPLAINED, Hops.DEADLINE)
        return Evidence(error, found.hops, record.ended_at, self._blamed(found.kind, output) if is_own else ())

    def _has_failed(self, record: ExitRecord) -> bool:
        """Whether it failed, or did not save in time; False if it was ended because something else failed."""
        if record.cause == Cause.REQUESTED:
            return not record.succeeded and record.reason.startswith(STOP_REQUESTED)
        # On one machine, the launcher that died has its own record, which says more.
        return (
            record.is_failure and record.cause != Cause.REFUSED and (record.cause != Cause.PARENT or bool(self.hosts))
        )

    def _blamed(self, kind: type[T5TrainError], text: str) -> tuple[str, ...]:
        """The rank's host, unless it only reports that a disk that all hosts share is full."""
        if not issubclass(kind, DiskFull):
            return self.hosts
        spec = self._this.folder / ATTEMPT_SPEC
        is_shared = not spec.exists() or not json.loads(spec.read_text("utf-8")).get("node_local")
        root = f"{self._this.folder.parents[3]}/"
        is_on_root = any(root in line and _NO_SPACE.search(line) for line in text.splitlines())
        return () if is_shared and is_on_root else self.hosts

    def _shown_output(self) -> str:
        """Where the output of a rank that was started is, and how it ends."""
        log = self._this.log(self.name)
        output = f"The output of the rank in attempt {self._this.folder.name}"
        if log.exists():
            return f"{output} is in {log}, and ends:\n{redact(tail(log))}"
        folder = f"{attempt_folder(self._this.run_id)} of {self.hosts[0]}" if self.hosts else self._this.folder
        return f"{output} could not be collected: look for {log.name} in the folder {folder}"


def _launcher_ended_first(this: Attempt, ranks: list[_Rank]) -> bool:
    """Whether it ended by itself, and no rank before it."""
    launcher = this.exit_record(LAUNCHER)
    if launcher is None or launcher.cause != Cause.EXITED:
        return False
    return all(rank.record is None or launcher.ended_at < rank.record.ended_at for rank in ranks)


def _launcher_failure(this: Attempt, ranks: list[_Rank]) -> LaunchError:
    record = this.exit_record(LAUNCHER)
    how = "was killed together with its guard, which watches it," if record is None else str(record)
    absent = [rank for rank in ranks if not rank.has_started]
    which = f"; {absent[0].who} never started" if absent else ""
    if absent and absent[0].hosts and absent[0].record is None:
        which += ", or its files could not be collected from that host"
    log = this.log(LAUNCHER)
    remedy = remedy_of_launcher(tail(log, _LINES_READ))
    launcher = "DeepSpeed's launcher" if this.hosts else "the launcher"
    return LaunchError(
        f"{launcher} {how} before its ranks had done their work{which}{remedy}. The output of the "
        f"launcher in attempt {this.folder.name} is in {log}, and ends:\n{redact(tail(log))}"
    )


def tail(log: Path, lines_kept: int = _TAIL_LINES) -> str:
    """Return the last lines of a log, without empty ones."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = shown_lines(file.read())
    except FileNotFoundError:
        return "  (no such file)"
    return "\n".join(f"  {line}" for line in lines[-lines_kept:]) or "  (nothing)"
