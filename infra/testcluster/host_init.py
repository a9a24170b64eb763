"""The first process of a host: mounts the host's view of the files, then adopts and reaps orphaned processes.

Started by infra.testcluster.host in new namespaces, with JSON on standard input: ``host``, ``record`` (where to write
the identity of this process), ``home`` (the folder where commands start) and ``mounts`` (folders of the host's own disk
and of the machine; everything else is read-only). Prints a line once the host is ready. When it ends, everything on the
host ends. Standard library only. mount(8) is not used, because it can neither make everything read-only at once, nor
mount a folder whose path is already covered by another mount.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from infra.node.processes import ProcessIdentity

_MS_BIND = 4096
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture; Linux 5.12
_READ_ONLY = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Mount:
    """A file or folder of the machine, and its path on a host."""

    source: str
    target: str
    writable: bool


class _Attributes(ctypes.Structure):
    """struct mount_attr of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def freeze() -> None:
    """Make everything that is mounted now read-only, only in this namespace."""
    _change("/", _Attributes(set=_READ_ONLY))


def mount_file_system(kind: str, target: str) -> None:
    """Mount a new file system without a disk: proc, sysfs or tmpfs."""
    _check(_libc.mount(kind.encode(), os.fsencode(target), kind.encode(), 0, None), target)


def bind(mounts: Iterable[Mount]) -> None:
    """Mount each source at its target, outer folders first. All sources are opened before, so no target hides one."""
    in_order = sorted(mounts, key=lambda mount: mount.target)
    opened = [os.open(mount.source, os.O_PATH) for mount in in_order]
    for mount, descriptor in zip(in_order, opened, strict=True):
        source = f"/proc/self/fd/{descriptor}".encode()
        _check(_libc.mount(source, os.fsencode(mount.target), None, _MS_BIND, None), mount.target)
        _change(mount.target, _Attributes(clear=_READ_ONLY) if mount.writable else _Attributes(set=_READ_ONLY))
        os.close(descriptor)


def _change(path: str, attributes: _Attributes) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, ctypes.byref(attributes), size
    )
    _check(result, path)


def _check(result: int, path: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def main() -> NoReturn:
    """Run as the host until killed."""
    wanted = json.load(sys.stdin)
    _record(Path(wanted["record"]))
    socket.sethostname(wanted["host"])
    freeze()
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm")):  # noqa: S108 - the host's own
        mount_file_system(kind, target)
    bind(Mount(**mount) for mount in wanted["mounts"])
    os.chdir(wanted["home"])
    print("ready", flush=True)  # noqa: T201 - the process that started this one reads it
    _reap()


def _record(path: Path) -> None:
    """Write the identity of this process outside the namespace. /proc shows it because it is still the machine's."""
    identity = ProcessIdentity.of(int(Path("/proc/self").readlink().name))
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(identity)), "utf-8")
    temporary.replace(path)


def _reap() -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    while True:
        with suppress(ChildProcessError):  # there are no children now
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
