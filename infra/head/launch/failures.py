"""Finds out why an attempt failed: which one error to raise, given the files that its ranks and guards left."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from infra.head.hosts.ssh_errors import remedy_of_launcher
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
    hops: int = 0
    """Distance from the cause: 1 for a rank that waited for another, 2 for one that lost another."""


_HOST_MEMORY = Diagnosis(
    OutOfMemory,
    "the host has too little memory. Use fewer ranks per host, move less to the host's memory (layout.offload), or end "
    "other programs there that use much of it",
)
_WAITED = Diagnosis(
    CollectiveTimeout,
    "the rank timed out in a collective. Check the output of the other ranks for one that hangs; if none does, suspect "
    "the network",
    hops=1,
)
_BY_CAUSE = {
    Cause.HEAD: Diagnosis(
        HostLost,
        "the network between the head and this host, or the head itself, was down for longer than "
        "cluster.lease_seconds. Repair the network, or raise cluster.lease_seconds",
    ),
    Cause.REQUESTED: Diagnosis(
        Preempted,
        "the rank saved no checkpoint. The same command continues from the last one, or begins at step 0 without one",
    ),
    Cause.PARENT: Diagnosis(
        LaunchError,
        "DeepSpeed's launcher on its host was killed. Check there what killed it, such as the OOM killer (`dmesg`)",
        hops=1,
    ),
    Cause.BEAT: Diagnosis(
        RankStopped,
        "check whether somebody stopped it (SIGSTOP, a debugger). If not, the end of its output shows what it did last",
    ),
    Cause.PHASE: Diagnosis(
        RankStopped,
        "the rank hung after the last line of its output. If it was only slow, raise cluster.deadlines for that phase",
    ),
    Cause.SAVE: Diagnosis(
        RankStopped,
        "check the disk that it wrote to. If that was only slow, raise cluster.deadlines.save_seconds",
    ),
}
_DISK_FULL = Diagnosis(
    DiskFull,
    "the rank's disk is full. Free some space at the path that the output names (remove files if it lacks inodes, as "
    "`df -i` shows), or choose another storage.root (or storage.scratch, if hosts have their own disks)",
)
# Matched with the last lines of a rank's log; the most specific come first.
_BY_WORDS: tuple[tuple[re.Pattern[str], Diagnosis], ...] = (
    (re.compile(r"No space left on device|Disk quota exceeded"), _DISK_FULL),
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
            hops=2,
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
    if record.cause in _BY_CAUSE:
        return _BY_CAUSE[record.cause]
    if record.returncode is not None and record.returncode < 0:
        return _of_signal(record, output)
    if _SHARED_MEMORY.search(output) and (full := _shared_memory(record)) is not None:
        return full
    # If the disk is full, the rank may have been unable to write that to its output.
    is_full = record.free_bytes is not None and record.free_bytes < _FULL_BYTES
    unknown = _DISK_FULL if is_full else Diagnosis(LaunchError, "")
    return next((found for words, found in _BY_WORDS if words.search(output)), unknown)


def _waits_for_others(output: str) -> bool:
    """Whether a thread was in a collective, by the stacks that the rank wrote before it was ended.

    A thread that imports a module of these packages is in one of their files, too.
    """
    return any(_IN_A_COLLECTIVE.search(stack) and _IMPORTING not in stack for stack in _STACK.split(output))


def _of_signal(record: ExitRecord, output: str) -> Diagnosis:
    # An exception in a thread of C++, such as NCCL's when a collective times out, ends the rank with SIGABRT.
    if record.returncode == _SIGABRT:
        return next((found for words, found in _BY_WORDS if words.search(output)), Diagnosis(RankKilled, ""))
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
    return Diagnosis(RankKilled, "")


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


@dataclass(frozen=True)
class Found:
    """The error to raise for a failed attempt, given what its ranks and guards left."""

    error: T5TrainError
    is_of_a_rank: bool
    """Whether a rank failed by itself. Otherwise, ranks only lost or waited for others, or were ended."""


def failure_of(this: Attempt, num_ranks: int) -> T5TrainError:
    """Return the error of ``find_failure``."""
    return find_failure(this, num_ranks).error


def find_failure(this: Attempt, num_ranks: int, lost_hosts: Collection[str] = ()) -> Found:
    """Find the error that a rank reported, or else a LaunchError of the class that fits the first rank that failed.

    Call this after all processes of the attempt have ended and the files of its ranks are in its folder. Ranks of
    ``lost_hosts`` may have left no exit record because their host was lost.
    """
    read = {rank: error_report.read(this.rank_files(rank_name(rank))) for rank in range(num_ranks)}
    reported = {rank: error for rank, error in read.items() if error is not None}
    of_ranks = reported | _of_guards(this, num_ranks)
    # Preempted is raised only if there is no other error.
    failed = [rank for rank, error in of_ranks.items() if not isinstance(error, Preempted)]
    if failed:
        first = min(failed, key=lambda rank: _ended_at(this, rank))
        return Found(_on_its_host(this, first, num_ranks, of_ranks[first]), is_of_a_rank=True)
    if (found := _first_failure(this, num_ranks, reported.keys(), lost_hosts)) is None:
        ended = next(iter(reported.values()), None) or _launcher_failure(this, num_ranks)
        return Found(ended, is_of_a_rank=False)
    kind, what, rank, hosts, is_of_a_rank = found
    return Found(kind(f"{what}. {_output_of(this, rank)}", hosts), is_of_a_rank)


def _ended_at(this: Attempt, rank: int) -> str:
    """When a rank ended; empty, which is before all others, if its guard could not even record that."""
    record = this.exit_record(rank_name(rank))
    return record.ended_at if record else ""


def _output_of(this: Attempt, rank: int) -> str:
    """Where the output of a rank that was started is, and how it ends."""
    log = this.log(rank_name(rank))
    output = f"The output of the rank in attempt {this.folder.name}"
    if log.exists():
        return f"{output} is in {log}, and ends:\n{redact(tail(log))}"
    host = "".join(f" of {host}" for host in _host_of(this, rank))
    place = attempt_folder(this.run_id) if this.hosts is not None else this.folder
    return f"{output} could not be collected: look for {log.name} in the folder {place}{host}"


def _of_guards(this: Attempt, num_ranks: int) -> dict[int, T5TrainError]:
    """Errors that guards wrote to the launcher's log because they could not write them to a file."""
    said = guard_failure.read(this.log(LAUNCHER))
    return {rank: said[rank_name(rank)] for rank in range(num_ranks) if rank_name(rank) in said}


def _on_its_host(this: Attempt, rank: int, num_ranks: int, error: T5TrainError) -> T5TrainError:
    """Add the rank, its host and how to exclude that host to a disk error. Returns any other error unchanged.

    A host is not blamed for a full disk that all hosts share.
    """
    if not isinstance(error, DiskFull | DiskFailed | StorageError):
        return error
    hosts = [] if isinstance(error, DiskFull) and _is_on_shared_root(this, error) else _host_of(this, rank)
    remedy = "".join(f". To train without {host}, use --exclude {host}" for host in hosts)
    return type(error)(f"{_who(this, rank, num_ranks, None)}: {error}{remedy}", hosts)


def _is_on_shared_root(this: Attempt, error: DiskFull) -> bool:
    spec = this.folder / ATTEMPT_SPEC
    is_shared = not spec.exists() or not json.loads(spec.read_text("utf-8")).get("node_local")
    return is_shared and f"{this.folder.parents[3]}/" in str(error)


_First = tuple[type[T5TrainError], str, int, list[str], bool]


def _first_failure(
    this: Attempt, num_ranks: int, explained: Collection[int], lost_hosts: Collection[str]
) -> _First | None:
    """Find the failure that caused the others.

    Returns the class of its error, what happened, the rank, the hosts to blame, and whether the rank failed by itself.

    Ranks that are ``explained`` are not considered. A killed guard comes first, since it explains all other failures;
    otherwise, the earliest of the failures with the fewest ``hops``. Returns None if no rank failed by itself: all were
    ended by others, or none ever started.
    """
    records = {rank: this.exit_record(rank_name(rank)) for rank in range(num_ranks) if rank not in explained}
    for rank, record in records.items():
        is_lost = not {*lost_hosts}.isdisjoint(_host_of(this, rank))
        if record is None and not is_lost and (this.folder / f"{rank_name(rank)}.pid").exists():
            who = _who(this, rank, num_ranks, None)
            try:
                try_writing(this.folder)
            except OSError as error:
                reason = of_rank(error)
                what = f"{who} ended, but its exit record was not written: {reason}"
                return type(reason), what, rank, [], True
            what = f"{who} was killed together with its guard, which watches it. Check `dmesg` for the OOM killer"
            return RankKilled, what, rank, _host_of(this, rank), True
    failed = [
        (diagnose(record, tail(this.log(record.name), _LINES_READ)), record, rank)
        for rank, record in records.items()
        if _is_cause(record, this.hosts is not None)
    ]
    if not failed:
        return None
    diagnosis, record, rank = min(failed, key=lambda one: (one[0].hops, one[1].ended_at))
    what = f"{_who(this, rank, num_ranks, record)} {record}"
    # With more hops, another host is at fault, and it is not known which. A host that was silent for so long that its
    # rank lost the head is named by the head, unless the head was suspended. A rank that was asked to end did not fail.
    is_known = diagnosis.hops == 0 and diagnosis.kind not in (HostLost, Preempted)
    # A rank that exceeded a deadline may have waited for another: one of another host that did so, or of a lost host.
    may_have_waited = record.cause in (Cause.PHASE, Cause.SAVE)
    alike = {tuple(_host_of(this, other)) for found, _, other in failed if found == diagnosis}
    blamed = _host_of(this, rank) if is_known and not (may_have_waited and len(alike) > 1) else []
    is_of_a_rank = is_known and not may_have_waited
    if diagnosis.advice:
        what = f"{what}: {diagnosis.advice}"
    return diagnosis.kind, what, rank, blamed, is_of_a_rank


def _who(this: Attempt, rank: int, num_ranks: int, record: ExitRecord | None) -> str:
    """Such as ``rank 3 of 4 on node2``; without the host for an attempt on this machine alone."""
    if this.hosts is None:
        return f"rank {rank} of {num_ranks}"
    return f"rank {rank} of {num_ranks} on {record.host if record else ''.join(_host_of(this, rank))}"


def _host_of(this: Attempt, rank: int) -> list[str]:
    """The rank's host as a list of one name; empty for an attempt on this machine alone."""
    return [host for host, slots in (this.hosts or {}).items() for _ in slots][rank : rank + 1]


def _launcher_failure(this: Attempt, num_ranks: int) -> LaunchError:
    record = this.exit_record(LAUNCHER)
    how = "was killed together with its guard, which watches it," if record is None else str(record)
    absent = [rank for rank in range(num_ranks) if not (this.folder / f"{rank_name(rank)}.pid").exists()]
    which = f"; {_who(this, absent[0], num_ranks, None)} {_why_absent(this, absent[0])}" if absent else ""
    log = this.log(LAUNCHER)
    remedy = remedy_of_launcher(tail(log, _LINES_READ))
    return LaunchError(
        f"DeepSpeed's launcher {how} before its ranks had done their work{which}{remedy}. The output of the "
        f"launcher in attempt {this.folder.name} is in {log}, and ends:\n{redact(tail(log))}"
    )


def _why_absent(this: Attempt, rank: int) -> str:
    """What is known of a rank whose files are not on the head."""
    if this.hosts is None or this.exit_record(rank_name(rank)) is not None:
        return "never started"
    return "never started, or its files could not be collected from that host"


def _is_cause(record: ExitRecord | None, is_over_hosts: bool) -> TypeGuard[ExitRecord]:
    """Whether a rank failed, or did not save in time; False if it was ended because something else failed."""
    if record is None or record.succeeded:
        return False
    if record.cause == Cause.REQUESTED:
        return record.reason.startswith(STOP_REQUESTED)
    # On one machine, the launcher that died has its own record, which says more.
    return record.cause != Cause.REFUSED and (record.cause != Cause.PARENT or is_over_hosts)


def tail(log: Path, lines_kept: int = _TAIL_LINES) -> str:
    """Return the last lines of a log, without empty ones."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = shown_lines(file.read())
    except FileNotFoundError:
        return "  (no such file)"
    return "\n".join(f"  {line}" for line in lines[-lines_kept:]) or "  (nothing)"
