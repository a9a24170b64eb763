"""The system calls that processes make while attached to a region, as strace sees them."""

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_KINDS = {
    "open": ["open", "openat", "openat2", "creat"],
    "read": ["read", "pread64", "readv", "preadv", "preadv2"],
    "write": ["write", "pwrite64", "writev", "pwritev", "pwritev2"],
    "mmap": ["mmap"],
    "fsync": ["fsync", "fdatasync", "sync_file_range"],
    "truncate": ["truncate", "ftruncate", "fallocate"],
    "lock": ["flock"],
    "rename": ["rename", "renameat", "renameat2"],
    "link": ["link", "linkat", "symlink", "symlinkat"],
    "unlink": ["unlink", "unlinkat"],
    "rmdir": ["rmdir"],
    "mkdir": ["mkdir", "mkdirat"],
    "readlink": ["readlink", "readlinkat"],
    "stat": ["stat", "lstat", "fstat", "newfstatat", "statx"],
    "access": ["access", "faccessat", "faccessat2"],
    "chmod": ["chmod", "fchmod", "fchmodat"],
    "utime": ["utime", "utimes", "utimensat", "futimesat"],
    "statfs": ["statfs", "fstatfs"],
    "readdir": ["getdents64", "getdents"],
}
_COPIES = {"sendfile": ("write", "read"), "copy_file_range": ("read", "write")}
"""What these calls do with their descriptors, in order."""
_KIND_OF = {call: kind for kind, calls in _KINDS.items() for call in calls}
_FORKS = ("clone", "clone3", "fork", "vfork")
_DESCRIPTOR_CALLS = {
    *_KINDS["read"], *_KINDS["write"], *_KINDS["mmap"], *_KINDS["fsync"], *_KINDS["lock"],
    *_KINDS["readdir"], "ftruncate", "fallocate", "fstat", "fchmod", "fstatfs",
}  # fmt: skip
_DESCRIPTOR_PATHS = re.compile(r"\b\d+<([^>]*)>")
_DESCRIPTOR = re.compile(r"^[^\"]*?\b\d+<(/[^>]*)>")
_NAME = re.compile(r'(?:(?:\d+|AT_FDCWD)<(?P<folder>[^>]*)>(?:\(deleted\))?, )?"(?P<name>(?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"(?P<thread>\d+) +(?P<call>\w+)\((?P<rest>.*)")
_RESUMED = re.compile(r"(?P<thread>\d+) +<\.\.\. (?P<call>\w+) resumed>(?P<rest>.*)")
_RANDOM = re.compile(r"(?<=[.-])(?<!step-)(?=[a-z_]*[0-9])[0-9a-z_]{8}(?![0-9a-z_])|(?<=#)[0-9]+")
_RANDOM_END = re.compile(r"(?<=-)[a-z_]{8}$")
_UNFINISHED = " <unfinished ...>"


@contextmanager
def strace(process: int, output: Path) -> Iterator[None]:
    """Trace a process and all its descendants. Raises PermissionError if that is not allowed."""
    calls = ",".join([*(f"?{call}" for call in _KIND_OF), *(f"?{call}" for call in (*_COPIES, *_FORKS))])
    children = Path(f"/proc/{process}/task/{process}/children").read_text("ascii").split()
    attached = ",".join([str(process), *children])
    command = ["strace", "-f", "-y", "-s", "1024", "-o", output, "-e", f"trace={calls}", "-p", attached]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        for _ in attached.split(","):
            if "attached" not in (answer := tracer.stderr.readline()):
                raise PermissionError(f"strace cannot attach: {answer}")
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)


def calls_below(folder: Path, region: Path, trace: Path) -> Counter[tuple[str, str]]:
    """Count the calls of each kind on each path below a folder, by processes attached to the region.

    Paths are in the library's form. A process is attached once it opens the region's file; its children are attached
    from their start.
    """
    attached, found = set[str](), Counter[tuple[str, str]]()
    for _, thread, call, rest in _complete_calls(trace.read_text("utf-8", "surrogateescape").splitlines()):
        _track_attached(thread, call, rest, attached, str(region))
        if thread in attached:
            found.update(_kinds_and_paths(call, rest, folder))
    return found


def _complete_calls(lines: Iterable[str]) -> list[tuple[int, str, str, str]]:
    """The start, thread, name and rest of each call, sorted by start.

    Calls that lines of other threads interrupt are put together, so that a thread's start comes before what it does.
    """
    parts, found = dict[tuple[str, str], tuple[int, str]](), list[tuple[int, str, str, str]]()
    for number, line in enumerate(lines):
        if match := _RESUMED.match(line):
            thread, call = match["thread"], match["call"]
            began, first = parts.pop((thread, call), (number, ""))
            found.append((began, thread, call, first + match["rest"]))
        elif match := _LINE.match(line):
            thread, call, rest = match["thread"], match["call"], match["rest"]
            if rest.endswith(_UNFINISHED):
                parts[thread, call] = number, rest.removesuffix(_UNFINISHED)
            else:
                found.append((number, thread, call, rest))
    return sorted(found)


def _kinds_and_paths(call: str, rest: str, folder: Path) -> Iterator[tuple[str, str]]:
    if call in _COPIES:
        for kind, path in zip(_COPIES[call], _DESCRIPTOR_PATHS.findall(rest), strict=False):
            if _is_below(path, folder):
                yield kind, normalised(path, folder)
    elif call in _KIND_OF:
        kind = "rmdir" if call == "unlinkat" and "AT_REMOVEDIR" in rest else _KIND_OF[call]
        if names := [normalised(path, folder) for path in _paths(call, rest) if _is_below(path, folder)]:
            yield kind, " > ".join(names) if kind in {"rename", "link"} else names[-1]


def _is_below(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}/")


def _track_attached(thread: str, call: str, rest: str, attached: set[str], region: str) -> None:
    if call in _FORKS and thread in attached and (match := re.search(r"= (\d+)", rest)):
        attached.add(match[1])
    if call == "openat" and f'"{region}"' in rest and "O_RDWR" in rest:
        attached.add(thread)


def normalised(path: str, folder: Path) -> str:
    """The path relative to the folder, with its random parts replaced by ``*`` as in the library."""
    return "/".join(map(_without_random_parts, str(Path(path).relative_to(folder)).split("/")))


def _without_random_parts(name: str) -> str:
    """Eight characters are random if one of them is a digit, or if they end the name of a hidden file."""
    replaced = _RANDOM.sub("*", name)
    return _RANDOM_END.sub("*", replaced) if name.startswith(".") else replaced


def _paths(call: str, rest: str) -> list[str]:
    """The absolute paths that the arguments name, or the path that a descriptor is open at."""
    if call in _DESCRIPTOR_CALLS:
        return [match[1].removesuffix("(deleted)").rstrip()] if (match := _DESCRIPTOR.search(rest)) else []
    found = []
    for match in _NAME.finditer(rest):
        folder, name = match["folder"], _unquoted(match["name"])
        found.append(name if name.startswith("/") else f"{folder}/{name}".rstrip("/"))
    return found[-1:] if call.startswith("symlink") else found[:1] if call.startswith("readlink") else found


def _unquoted(quoted: str) -> str:
    return quoted.encode("latin-1", "replace").decode("unicode_escape")
