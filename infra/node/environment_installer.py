"""Makes a new environment on a host from the wheels of a wheelhouse, without any index of packages.

Wheels are kept in ``wheels`` of the node folder until another wheelhouse is installed, so only those that are missing
are requested from the head. ``.t5-pretrain.json`` in an environment names the wheelhouse that it is made of, and says
whether it is complete. The file is there from the start, and says so only when everything else is on disk. A folder
without it belongs to somebody else and is never touched.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from infra.node.channel import Channel
from infra.node.messages import Request
from infra.node.node_folders import node_folder
from infra.node.storage.file_channel import FromReceiver, ProgressRelay, Wanted, fetch_over
from infra.node.storage.pull import missing_bytes, pull
from t5train.errors import DigestMismatch, HostMisconfigured, StorageError
from t5train.files.atomic import write_json
from t5train.files.confined import child
from t5train.files.locks import flock, private_folder, try_lock
from t5train.files.os_errors import nearest_existing
from t5train.quantities import format_bytes

MARKER = ".t5-pretrain.json"
_SPARE_BYTES = 200 << 20  # pip, caches of compiled modules, and temporary files
_SHOWN_LINES = 4


@dataclass(frozen=True)
class Install(Request):
    """Make the environment ``into``, unless it is there. The host then requests the wheels that it lacks."""

    action: ClassVar[str] = "install"
    into: Path
    wheelhouse: str
    """The digest of the wheelhouse."""
    wheels: tuple[Wanted, ...]
    unpacked_bytes: int
    """Disk space that the environment takes."""


@dataclass(frozen=True)
class Working(FromReceiver):
    """What the host does now."""

    what: str


@dataclass(frozen=True)
class Installed(FromReceiver):
    """The environment is on the host; ``is_new`` if it was not before."""

    is_new: bool


def install(request: Install, head: Channel) -> None:
    """Make the environment. If the head closes the connection before that, the installation ends."""
    store = private_folder(node_folder() / "wheels")
    with _locked(store, "another installation on this host", head):
        is_new = not _is_complete(request.into, request.wheelhouse)
        if is_new:
            _make_parents(request.into)
            with _claimed(request, head) as is_new:
                if is_new:
                    _make(request, store, head)
            if is_new:
                with suppress(OSError):  # the environment is complete; the next installation removes what is left
                    _remove_others(store, [store / wheel.name for wheel in request.wheels])
        head.send(Installed(is_new))


def _make(request: Install, store: Path, head: Channel) -> None:
    wheels = [child(store, wheel.name, "the head") for wheel in request.wheels]
    if others := [path.name for path in wheels if path.suffix != ".whl"]:
        raise StorageError(f"the head names {others[0]!r}, which is not a wheel. Check what runs there")
    _require_disk_space(request, store)
    _receive(request.wheels, store, head)
    _end_with_head()
    _fill(request, wheels, store / "requirements.txt", head)


@contextmanager
def _locked(path: Path, what: str, head: Channel) -> Iterator[None]:
    """Hold the lock of a file or folder. The kernel releases it however this process ends."""
    while True:
        # NFS locks only files that are open for writing.
        descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
        try:
            if not try_lock(descriptor):
                head.send(Working(f"waiting for {what}"))
                flock(descriptor, fcntl.LOCK_EX)
            if _is_still(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at ``path``, which may have been replaced since it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        raise HostMisconfigured(f"{path} was removed while this host waited for it. Repeat the command") from None


def _is_complete(into: Path, wheelhouse: str) -> bool:
    """Whether the environment is there. Raises HostMisconfigured for a folder that others made, or can change."""
    try:
        found = into.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise HostMisconfigured(f"{into} exists and is not a folder; it was left as it is. Choose another --into")
    try:
        text = (into / MARKER).read_bytes()
        marker = json.loads(text) if text else {"wheelhouse": "", "complete": False}  # see _mark_unfinished
        of, complete = str(marker["wheelhouse"]), bool(marker["complete"])
    except FileNotFoundError:
        if any(into.iterdir()):
            raise HostMisconfigured(
                f"{into} exists and was not made by this command; it was left as it is. Choose another --into"
            ) from None
        return False
    except (ValueError, KeyError, TypeError):
        raise HostMisconfigured(
            f"{into / MARKER} is damaged; nothing was changed. Remove {into}, or choose another"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise HostMisconfigured(
            f"other users can change {into}. Choose another --into, or make it private (chmod go-w)"
        )
    if complete and of != wheelhouse:
        raise HostMisconfigured(
            f"{into} is an environment of another wheelhouse ({of[:12]}); it was left as it is. Choose another --into"
        )
    return complete


def _require_disk_space(request: Install, store: Path) -> None:
    """Raise HostMisconfigured if a disk is too small; both folders may be on the same one."""
    needed: dict[int, tuple[Path, int]] = {}
    into, arriving = nearest_existing(request.into), missing_bytes(store, request.wheels)
    for folder, size in ((store, arriving), (into, request.unpacked_bytes + _SPARE_BYTES)):
        device = folder.stat().st_dev
        needed[device] = (folder, needed.get(device, (folder, 0))[1] + size)
    for folder, size in needed.values():
        if (free := shutil.disk_usage(folder).free) < size:
            raise HostMisconfigured(
                f"the disk of {folder} has {format_bytes(free)} free, and the environment needs {format_bytes(size)}. "
                "Free some space there, or choose another --into"
            )


def _receive(wheels: Iterable[Wanted], store: Path, head: Channel) -> None:
    """Receive the wheels that are missing. Each gets its name only if its digest is right."""
    relay = ProgressRelay(head)
    try:
        pull(fetch_over(head), wheels, store, relay)
    except DigestMismatch as error:
        raise DigestMismatch(
            f"{error}: the wheel was changed or is damaged. Nothing was installed. Repeat `t5-pretrain wheelhouse`, "
            "then this command"
        ) from None
    relay.end()


def _end_with_head() -> None:
    """Have this process end, with all that it starts, when the head closes its end. The marker stays unfinished."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)

    def watch() -> NoReturn:
        os.read(0, 1)  # the head sends nothing more
        os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_parents(into: Path) -> None:
    """Create the parents, private if they are new. Others must not be able to replace the environment's folder."""
    into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = into.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise HostMisconfigured(
            f"every user can replace what is in {into.parent}. Choose another --into, or make it private"
        )


@contextmanager
def _claimed(request: Install, head: Channel) -> Iterator[bool]:
    """Yield whether the environment has to be made, with its folder reserved, and empty but for the marker.

    Several hosts can share the folder: one makes it, others wait. If the block fails, the folder is emptied again.
    """
    into, unfinished = request.into, {"wheelhouse": request.wheelhouse, "complete": False}
    into.mkdir(mode=0o700, exist_ok=True)
    _is_complete(into, request.wheelhouse)  # still nobody else's
    with suppress(FileExistsError), open(into / MARKER, "x", encoding="utf-8") as file:
        json.dump(unfinished, file)
    with _locked(into / MARKER, f"another host to make {into}", head):
        if _is_complete(into, request.wheelhouse):
            yield False
            return
        _remove_others(into, [into / MARKER])
        try:
            yield True
        except BaseException:
            with suppress(OSError):  # the first error says more
                _mark_unfinished(into)
                _remove_others(into, [into / MARKER])
            raise


def _mark_unfinished(into: Path) -> None:
    """Empty the marker: that needs no space on a full disk, and keeps the file whose lock is held."""
    with open(into / MARKER, "wb") as file:
        os.fsync(file.fileno())


def _fill(request: Install, wheels: Sequence[Path], listed: Path, head: Channel) -> None:
    """Make the environment and install the wheels, whose digests pip verifies again. The marker is completed last.

    ``listed`` is a file for pip's list of wheels.
    """
    into = request.into
    head.send(Working("creating the environment"))
    _run([sys.executable, "-I", "-m", "venv", str(into)], "the environment cannot be created")
    pairs = zip(wheels, request.wheels, strict=True)
    listed.write_text("".join(f"{path.as_uri()} --hash=sha256:{wheel.sha256}\n" for path, wheel in pairs), "utf-8")
    head.send(Working(f"installing {len(wheels)} wheels"))
    offline = ["--no-index", "--no-cache-dir", "--only-binary=:all:", "--require-hashes", "--no-input"]
    words = ["install", *offline, "--disable-pip-version-check", "--quiet", f"--requirement={listed}"]
    _run([str(into / "bin" / "python"), "-I", "-m", "pip", *words], "the wheels cannot be installed")
    _sync_disk(into)  # the marker comes last on the disk, too
    write_json(into / MARKER, {"wheelhouse": request.wheelhouse, "complete": True})


def _sync_disk(folder: Path) -> None:
    """Wait until what was written to the file system of a folder is on its disk. Raises OSError if it cannot be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def _run(argv: list[str], otherwise: str) -> None:
    """Run a program that sees nothing of pip's configuration on this host."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**kept, "PIP_CONFIG_FILE": os.devnull, "LC_ALL": "C.UTF-8"},
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        said = " / ".join(lines[-_SHOWN_LINES:]) or f"exit code {done.returncode}"
        raise HostMisconfigured(f"{otherwise}: {said}")


def _remove_others(folder: Path, kept: Sequence[Path]) -> None:
    """Remove everything from a folder except for these files."""
    for path in folder.iterdir():
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
