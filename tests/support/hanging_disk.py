"""A file system that can hang, as one on NFS does when its server is gone: a folder, seen through FUSE.

::

    python -m tests.support.hanging_disk SOURCE TARGET     as root

After SIGUSR1 it stops, and every access to TARGET waits; continue it (SIGCONT), and they go on. Processes that wait
can be killed, as on NFS, because it stops between two requests: the kernel waits for one that it has read. Kill it, and
they get ENOTCONN, so that it leaves no process that nothing can end. TARGET may be SOURCE. No library is used: requests
and answers are those of include/uapi/linux/fuse.h.
"""

import ctypes
import errno
import os
import resource
import select
import signal
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

DEVICE = Path("/dev/fuse")
_ROOT = 1
_HEADER, _ANSWER = struct.Struct("<IIQQIII4x"), struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_MODE, _OWNER, _GROUP, _SIZE, _ATIME, _MTIME, _ATIME_NOW, _MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256
_MOST_WRITTEN = 128 << 10
_VERSION = (7, 31)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class _Node:
    """A file that the kernel knows by a number."""

    descriptor: int
    key: tuple[int, int]
    references: int = 0


class HangingDisk:
    """Answers the kernel's requests about one mount, one after the other."""

    def __init__(self, source: str, target: str) -> None:
        """Mount ``source`` on ``target``. Raises OSError if the kernel does not allow it."""
        top = os.open(source, os.O_PATH)  # before the mount, which may cover it
        self._nodes = {_ROOT: _Node(top, _key(os.fstat(top)), 1)}
        self._numbers = {self._nodes[_ROOT].key: _ROOT}
        self._last = _ROOT
        self._lists = dict[int, list[tuple[str, os.stat_result]]]()
        self._device = os.open(DEVICE, os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions".encode()
        if _libc.mount(b"hanging_disk", os.fsencode(target), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    def serve(self) -> NoReturn:
        """Answer requests until this process is killed, and stop at SIGUSR1."""
        asked, asks = os.pipe()
        os.set_blocking(asks, False)
        signal.set_wakeup_fd(asks)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        while True:
            if asked in select.select([asked, self._device], [], [])[0]:
                os.read(asked, 1)
                os.kill(os.getpid(), signal.SIGSTOP)
                continue
            request = os.read(self._device, _MOST_WRITTEN + 4096)
            _, code, unique, number, *_ = _HEADER.unpack_from(request)
            handler = self._HANDLERS.get(code)
            try:
                answer = _refused() if handler is None else handler(self, number, request[_HEADER.size :])
                error = 0
            except OSError as failure:
                answer, error = b"", -(failure.errno or errno.EIO)
            if answer is not None:
                with suppress(FileNotFoundError):  # whoever asked was killed meanwhile
                    os.write(self._device, _ANSWER.pack(_ANSWER.size + len(answer), error, unique) + answer)

    def _initialise(self, _: int, data: bytes) -> bytes:
        readahead = struct.unpack_from("<3I", data)[2]
        return struct.pack("<4I2H2I2HI28x", *_VERSION, readahead, 0, 0, 0, _MOST_WRITTEN, 1, 0, 0, 0)

    def _look_up(self, number: int, data: bytes) -> bytes:
        return self._entry(number, _name(data))

    def _forget(self, number: int, data: bytes) -> None:
        self._drop(number, *struct.unpack_from("<Q", data))

    def _forget_many(self, _: int, data: bytes) -> None:
        for number, count in struct.iter_unpack("<QQ", data[8 : 8 + 16 * struct.unpack_from("<I", data)[0]]):
            self._drop(number, count)

    def _get_attributes(self, number: int, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.fstat(self._nodes[number].descriptor))

    def _set_attributes(self, number: int, data: bytes) -> bytes:
        what, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = struct.unpack_from(
            "<II6Q8I", data
        )
        path = self._path(number)
        if what & _MODE:
            Path(path).chmod(stat.S_IMODE(mode))
        if what & (_OWNER | _GROUP):
            os.chown(path, uid if what & _OWNER else -1, gid if what & _GROUP else -1)
        if what & _SIZE:
            os.truncate(path, size)
        if what & (_ATIME_NOW | _MTIME_NOW):
            os.utime(path)
        elif what & (_ATIME | _MTIME):
            before = Path(path).stat()
            times = (
                atime * 10**9 + atime_ns if what & _ATIME else before.st_atime_ns,
                mtime * 10**9 + mtime_ns if what & _MTIME else before.st_mtime_ns,
            )
            os.utime(path, ns=times)
        return self._get_attributes(number, b"")

    def _read_link(self, number: int, _: bytes) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes[number].descriptor))

    def _make_link(self, number: int, data: bytes) -> bytes:
        name, target = data.split(b"\0")[:2]
        os.symlink(target, name, dir_fd=self._nodes[number].descriptor)
        return self._entry(number, name)

    def _make_folder(self, number: int, data: bytes) -> bytes:
        name = _name(data[8:])
        os.mkdir(name, struct.unpack_from("<I", data)[0], dir_fd=self._nodes[number].descriptor)
        return self._entry(number, name)

    def _unlink(self, number: int, data: bytes) -> bytes:
        os.unlink(_name(data), dir_fd=self._nodes[number].descriptor)
        return b""

    def _remove_folder(self, number: int, data: bytes) -> bytes:
        os.rmdir(_name(data), dir_fd=self._nodes[number].descriptor)
        return b""

    def _rename(self, number: int, data: bytes, skipped: int = 8) -> bytes:
        target = struct.unpack_from("<Q", data)[0]
        old, new = data[skipped:].split(b"\0")[:2]
        folders = self._nodes[number].descriptor, self._nodes[target].descriptor
        os.rename(old, new, src_dir_fd=folders[0], dst_dir_fd=folders[1])
        return b""

    def _rename_with_flags(self, number: int, data: bytes) -> bytes:
        if struct.unpack_from("<I", data, 8)[0]:
            raise OSError(errno.EINVAL, "flags are not supported")
        return self._rename(number, data, skipped=16)

    def _link(self, number: int, data: bytes) -> bytes:
        source, name = self._path(struct.unpack_from("<Q", data)[0]), _name(data[8:])
        os.link(source, name, dst_dir_fd=self._nodes[number].descriptor, follow_symlinks=True)
        return self._entry(number, name)

    def _open(self, number: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & ~os.O_NOFOLLOW & ~os.O_CREAT & ~os.O_EXCL & ~os.O_APPEND
        return struct.pack("<QII", os.open(self._path(number), flags), 0, 0)

    def _create(self, number: int, data: bytes) -> bytes:
        flags, mode, name = *struct.unpack_from("<II", data), _name(data[16:])
        opened = os.open(name, (flags & ~os.O_APPEND) | os.O_CREAT, mode, dir_fd=self._nodes[number].descriptor)
        return self._entry(number, name) + struct.pack("<QII", opened, 0, 0)

    def _read(self, _: int, data: bytes) -> bytes:
        opened, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(opened, size, offset)

    def _write(self, _: int, data: bytes) -> bytes:
        opened, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(opened, data[40 : 40 + size], offset), 0)

    def _sync(self, _: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def _release(self, _: int, data: bytes) -> bytes:
        opened = struct.unpack_from("<Q", data)[0]
        self._lists.pop(opened, None)
        os.close(opened)
        return b""

    def _open_folder(self, number: int, _: bytes) -> bytes:
        opened = os.open(self._path(number), os.O_RDONLY | os.O_DIRECTORY)
        return struct.pack("<QII", opened, 0, 0)

    def _read_folder(self, _: int, data: bytes) -> bytes:
        opened, offset, size = struct.unpack_from("<QQI", data)
        if not offset:
            with os.scandir(opened) as entries:
                self._lists[opened] = [(each.name, each.stat(follow_symlinks=False)) for each in entries]
        answer = b""
        for position, (name, found) in enumerate(self._lists[opened][offset:], offset + 1):
            encoded = os.fsencode(name)
            entry = struct.pack("<QQII", found.st_ino, position, len(encoded), stat.S_IFMT(found.st_mode) >> 12)
            padded = (entry + encoded).ljust(-(-(len(entry) + len(encoded)) // 8) * 8, b"\0")
            if len(answer) + len(padded) > size:
                break
            answer += padded
        return answer

    def _free_space(self, number: int, _: bytes) -> bytes:
        disk = os.statvfs(self._path(number))
        blocks = (disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree)
        return struct.pack("<5Q3I28x", *blocks, disk.f_bsize, disk.f_namemax, disk.f_frsize)

    def _nothing(self, _number: int, _data: bytes) -> bytes:
        return b""

    def _ignore(self, _number: int, _data: bytes) -> None:
        """An interrupted request is answered as any other."""

    def _path(self, number: int) -> str:
        return f"/proc/self/fd/{self._nodes[number].descriptor}"

    def _entry(self, folder: int, name: bytes) -> bytes:
        """Give the kernel a number for a name in a folder, the same for the same file."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[folder].descriptor)
        found = os.fstat(descriptor)
        number = self._numbers.get(_key(found))
        if number is None:
            number = self._last = self._last + 1
            self._nodes[number], self._numbers[_key(found)] = _Node(descriptor, _key(found)), number
        else:
            os.close(descriptor)
        self._nodes[number].references += 1
        return struct.pack("<4QII", number, 0, 0, 0, 0, 0) + _attributes(found)

    def _drop(self, number: int, count: int) -> None:
        node = self._nodes[number]
        node.references -= count
        if node.references <= 0 and number != _ROOT:
            os.close(node.descriptor)
            del self._nodes[number], self._numbers[node.key]

    _HANDLERS: ClassVar[dict[int, Callable[["HangingDisk", int, bytes], bytes | None]]] = {
        1: _look_up, 2: _forget, 3: _get_attributes, 4: _set_attributes, 5: _read_link, 6: _make_link, 9: _make_folder,
        10: _unlink, 11: _remove_folder, 12: _rename, 13: _link, 14: _open, 15: _read, 16: _write, 17: _free_space,
        18: _release, 20: _sync, 26: _initialise, 27: _open_folder, 28: _read_folder, 29: _release,
        30: _sync, 35: _create, 36: _ignore, 38: _nothing, 42: _forget_many, 45: _rename_with_flags,
    }  # fmt: skip
    """Without FLUSH, for which a killed process would wait when its files are closed."""


def _refused() -> NoReturn:
    raise OSError(errno.ENOSYS, "not supported")


def _name(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _attributes(found: os.stat_result) -> bytes:
    times = [divmod(each, 10**9) for each in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    return _ATTRIBUTES.pack(
        found.st_ino, found.st_size, found.st_blocks, *(seconds for seconds, _ in times),
        *(ns for _, ns in times), found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, found.st_blksize, 0,
    )  # fmt: skip


def main() -> None:
    """Mount and serve."""
    os.umask(0)  # the kernel has applied that of whoever asks
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    HangingDisk(*sys.argv[1:]).serve()


if __name__ == "__main__":
    main()
