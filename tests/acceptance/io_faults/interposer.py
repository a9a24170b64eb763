"""The LD_PRELOAD library that makes system calls fail (``interposer.c``), and the shared memory that controls it."""

import ctypes
import mmap
import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ENVIRONMENT = "T5_IO_FAULTS"
_SOURCE = Path(__file__).with_name("interposer.c")
_PATH_BYTES, _LOG_BYTES = 1024, 16 << 20
Mode = Literal["once", "permanently"]
_RECORD = 0
_MODES: dict[Mode, int] = {"once": 1, "permanently": 2}


@dataclass(frozen=True, order=True)
class Call:
    """A system call: its kind, its path below the watched folder, and its number among the same calls, from 1."""

    kind: str
    path: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kind} {self.path} #{self.ordinal}"


@dataclass(frozen=True, order=True)
class Fault:
    """A call that fails with ``error`` (an errno). If the mode is permanent, all later calls on its path fail too."""

    call: Call
    error: int
    mode: Mode


class _Layout(ctypes.Structure):
    """``struct region`` of the library."""

    mode: int
    error: int
    ordinal: int
    matched: int
    fired: int
    log_used: int
    kind: bytes
    path: bytes
    folder: bytes

    _fields_ = (
        ("mode", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("ordinal", ctypes.c_uint32),
        ("matched", ctypes.c_uint32),
        ("fired", ctypes.c_uint32),
        ("log_used", ctypes.c_uint32),
        ("kind", ctypes.c_char * 32),
        ("path", ctypes.c_char * _PATH_BYTES),
        ("folder", ctypes.c_char * _PATH_BYTES),
        ("failed", ctypes.c_char * _PATH_BYTES * 2),
        ("log", ctypes.c_char * _LOG_BYTES),
    )


class Region:
    """Memory that attached processes share: which calls are watched, which one fails, and what has happened."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Create the file ``path``. Calls on paths below ``folder`` are watched."""
        self.path, self.folder = path, folder.resolve()
        with open(path, "wb+") as file:
            file.truncate(ctypes.sizeof(_Layout))
            self._memory = mmap.mmap(file.fileno(), 0)
        self._shared = _Layout.from_buffer(self._memory)
        self._shared.folder = os.fsencode(self.folder)

    def record(self) -> None:
        """Let every call succeed, and record it."""
        self._prepare(_RECORD)

    def inject(self, fault: Fault) -> None:
        self._prepare(_MODES[fault.mode])
        self._shared.error, self._shared.ordinal = fault.error, fault.call.ordinal
        self._shared.kind, self._shared.path = os.fsencode(fault.call.kind), os.fsencode(fault.call.path)

    def _prepare(self, mode: int) -> None:
        size = _Layout.log.offset  # type: ignore[attr-defined] - ctypes makes descriptors of fields
        ctypes.memset(ctypes.addressof(self._shared), 0, size)
        self._shared.folder = os.fsencode(self.folder)
        self._shared.mode = mode

    @property
    def fired(self) -> int:
        return self._shared.fired

    @property
    def failed_paths(self) -> list[str]:
        return [os.fsdecode(each.value) for each in self._shared.failed if each.value]  # type: ignore[attr-defined]

    def calls(self) -> list[Call]:
        size = self._shared.log_used
        assert size <= _LOG_BYTES, "the log of calls is full"
        start = _Layout.log.offset  # type: ignore[attr-defined]
        lines = self._memory[start : start + size].decode("utf-8", "surrogateescape").splitlines()
        counts = Counter(tuple(line.split("\t", 1)) for line in lines)
        return [Call(kind, path, n + 1) for (kind, path), count in sorted(counts.items()) for n in range(count)]


def build(folder: Path) -> Path:
    """Compile the library into a folder; return its path."""
    library = folder / "io_faults.so"
    options = ["-std=gnu2x", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    subprocess.run(["cc", *options, "-o", library, _SOURCE, "-ldl", "-pthread"], check=True)
    return library


def attach(region: Path) -> None:
    """Apply a region to the calls of this process, and of those that it forks or runs from now on."""
    os.environ[ENVIRONMENT] = str(region)


def detach() -> None:
    os.environ.pop(ENVIRONMENT, None)
