"""What it means that a rank ended as it did: the class of the error, and what may help."""

import re
from dataclasses import dataclass

from infra.attempts.exit_record import Cause, ExitRecord
from infra.shared_memory import REMEDY, SEGMENTS, Room
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
)

_SIGKILL, _SIGBUS, _SIGSEGV = -9, -7, -11
_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class Diagnosis:
    """The class of an error, and a sentence to go with it."""

    kind: type[LaunchError]
    advice: str
    hops: int = 0
    """From the cause: 1 for a rank that waited for another, 2 for one that lost another."""


_HOST_MEMORY = Diagnosis(
    OutOfMemory, "the host has too little memory: use fewer ranks a host, or less of layout.offload; see its other uses"
)
_WAITED = Diagnosis(
    CollectiveTimeout,
    "it waited in a collective for others in vain: their output tells which one hangs, else the network does",
    hops=1,
)
_BY_CAUSE = {
    Cause.HEAD: Diagnosis(
        HostLost, "the network between the head and this host, or the head itself, was gone too long"
    ),
    Cause.TOLD: Diagnosis(Preempted, "it saved nothing: the same command goes on from the last checkpoint"),
    Cause.PARENT: Diagnosis(LaunchError, "DeepSpeed's launcher on its host was killed", hops=1),
    Cause.BEAT: Diagnosis(RankStopped, ""),
    Cause.PHASE: Diagnosis(
        RankStopped, "it hangs where its output ends; if it only needs more time, raise cluster.deadlines of that phase"
    ),
}
_DISK_FULL = Diagnosis(
    DiskFull,
    "its disk is full: make room where the output names a path, or choose another storage.root; storage.scratch, where "
    "hosts have disks of their own",
)
# By what the last lines of an output hold, the more telling first.
_BY_WORDS: tuple[tuple[re.Pattern[str], Diagnosis], ...] = (
    (re.compile(r"No space left on device|Disk quota exceeded"), _DISK_FULL),
    (
        re.compile(r"Read-only file system|Input/output error|Stale file handle"),
        Diagnosis(
            DiskFailed,
            "its disk fails or was made read-only, and its output names the path: see `dmesg` there, repair and "
            "remount the disk, or choose another storage.root or storage.scratch",
        ),
    ),
    (re.compile(r"\[enforce fail at inline_container\.cc"), _DISK_FULL),
    (re.compile(r"\bMemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc"), _HOST_MEMORY),
    (
        re.compile(r"OutOfMemoryError|out of memory|OUT_OF_MEMORY", re.IGNORECASE),
        Diagnosis(
            OutOfMemory,
            "the accelerator has too little memory: lower layout.micro_batch_sequences, raise layout.zero_stage, set "
            "model.activation_checkpointing or layout.offload, and see that no other program uses it",
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
            r"|ncclRemoteError|Connection was likely closed"
        ),
        Diagnosis(LaunchError, "another rank was gone: see the others' output", hops=2),
    ),
)
# NCCL's and torch's words for it.
_SHARED_MEMORY = re.compile(rf"{SEGMENTS}|shared memory|No space left on device")
_IN_A_COLLECTIVE = re.compile(r'File "[^"]*(torch/distributed|deepspeed/comm)/')


def diagnose(record: ExitRecord, output: str) -> Diagnosis:
    """Of a rank that did not succeed; ``output`` is the end of what it wrote."""
    if record.cause == Cause.PHASE and _IN_A_COLLECTIVE.search(output):
        return _WAITED
    if record.cause in _BY_CAUSE:
        return _BY_CAUSE[record.cause]
    if record.returncode is not None and record.returncode < 0:
        return _of_signal(record)
    if _SHARED_MEMORY.search(output) and (full := _shared_memory(record)) is not None:
        return full
    # Of a disk that is full, its own output could not tell.
    is_full = record.free_bytes is not None and record.free_bytes < _FULL_BYTES
    unknown = _DISK_FULL if is_full else Diagnosis(LaunchError, "")
    return next((found for words, found in _BY_WORDS if words.search(output)), unknown)


def _of_signal(record: ExitRecord) -> Diagnosis:
    if record.returncode == _SIGKILL and record.oom_kills:
        return _HOST_MEMORY
    if record.returncode in (_SIGBUS, _SIGSEGV) and (full := _shared_memory(record)) is not None:
        return full
    if record.returncode == _SIGBUS:
        return Diagnosis(RankKilled, "a file in memory or on a full disk could not grow: see /dev/shm and its disks")
    return Diagnosis(RankKilled, "")


def _shared_memory(record: ExitRecord) -> Diagnosis | None:
    """That /dev/shm is full, where it is."""
    free, total = record.shared_memory_free_bytes, record.shared_memory_bytes
    if free is None or total is None or free >= _FULL_BYTES:
        return None
    return Diagnosis(DiskFull, f"{SEGMENTS} on {record.host or 'its host'} is full ({Room(free, total)}): {REMEDY}")
