"""Receives the head's code on a host. The host may have none of it, so this file is run there with ``python -c``.

The request is a ``Delivery``, encoded as in infra.node.messages. The answer, ``Held``, says whether
``{place}/code/{digest}`` now contains the whole bundle. If the code there was changed, the bundle replaces it.
Standard library only, and no imports from this project.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from base64 import b64decode
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Delivery:
    """The head's user id, the node folder for the code (infra.node.node_folders), and the code's digest.

    ``content`` is the bundle (infra.node.code_bundle), or empty if the head only asks whether the host has it.
    """

    user: int
    place: str
    digest: str
    content: bytes


@dataclass(frozen=True)
class Held:
    """Whether the host has the whole bundle."""

    is_held: bool


_MODULE = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*/)+[A-Za-z_][A-Za-z0-9_]*\.py")
_COMPILED = "__pycache__"


def hold(user: int, place: Path, digest: str, content: bytes) -> bool:
    """Install ``content`` if the host lacks this code; returns whether it has the code now. Exits on failure."""
    if os.getuid() != user:
        sys.exit(
            f"the user id is {os.getuid()} on this host and {user} on the head. Give both accounts the same id, or set "
            "cluster.ssh_user"
        )
    sources = _verified(content, digest) if content else {}
    code = _private(_private(place) / "code")
    lock = os.open(code, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another head may be installing the same code
        if not (held := _is_whole(code / digest, digest)) and sources:
            _put(sources, code / digest)
        if held or sources:
            os.utime(code / digest)  # records when it was last needed
        return held or bool(sources)
    finally:
        os.close(lock)


def _verified(content: bytes, digest: str) -> dict[str, str]:
    """Return the sources by name. The digest is verified before the bytes are parsed."""
    if hashlib.sha256(content).hexdigest() != digest:
        sys.exit(f"the head's code {digest[:12]} arrived damaged ({len(content)} bytes). Start the command again")
    sources: dict[str, str] = json.loads(content)
    for name in sources:
        if not _MODULE.fullmatch(name):
            sys.exit(
                f"the head's code {digest[:12]} contains {name!r}, which is not a valid module path. Rename that file"
            )
    return sources


def _private(folder: Path) -> Path:
    """Create a folder for its owner alone; refuse links, other owners and access by others (as t5train.files.locks)."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        sys.exit(
            f"{folder} is not a folder that only user {os.getuid()} can access. Move it away, then start again: a new, "
            "empty folder is created"
        )
    return folder


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether the folder contains exactly the code with this digest."""
    if not os.path.lexists(folder) or not _is_private(folder):
        return False
    found = [path for path in folder.rglob("*") if _COMPILED not in path.parts]
    if any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in found):
        return False
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if path.is_file()}
    sources = {name: content.decode("utf-8", "replace") for name, content in files.items()}
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest() == digest


def _put(sources: dict[str, str], folder: Path) -> None:
    """Write the files under a temporary name, and sync them to disk before the folder gets its name."""
    partial, discarded = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "discarded"))
    try:
        for left in (partial, discarded):
            _remove(left)
        partial.mkdir(mode=0o700)
        for name, source in sources.items():
            _write(partial / name, source.encode())
        for each, _, _ in os.walk(partial):
            _sync(each)
        if os.path.lexists(folder):
            folder.rename(discarded)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        for left in (partial, discarded):
            _remove(left)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: str | Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    """Answer the head's request."""
    os.umask(0o077)
    delivery = Delivery(**json.loads(sys.stdin.buffer.readline())[Delivery.__name__])
    try:
        held = Held(hold(delivery.user, Path(delivery.place), delivery.digest, b64decode(delivery.content)))
    except OSError as error:
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "Free space or inodes there" if is_full else "Check its permissions, and `dmesg` for a disk error"
        sys.exit(f"the head's code cannot be stored in {delivery.place}: {error}. {remedy}")
    sys.stdout.write(json.dumps({Held.__name__: asdict(held)}) + "\n")


if __name__ == "__main__":
    main()
