"""The wheels that a host has received, each in a folder named by its digest.

::

    {store}/{sha256}/{name}         a whole wheel, kept until another wheelhouse is installed
    {store}/{sha256}/{name}.part    what has arrived of one
"""

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import IO

from infra.node.environments.installation_messages import Refusal

_CHUNK_BYTES = 1 << 20


def private_store(folder: Path) -> Path:
    """Create the store within the node folder, both for their owner alone. Refuses folders that others can access."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise Refusal(f"{each} is not a folder that only user {os.getuid()} can access. Move it away, then repeat")
    return folder


def held_bytes(store: Path, name: str, size: int, digest: str) -> int:
    """How many bytes of a wheel are here: all, if it has the right digest."""
    path = store / digest / name
    if path.is_file() and not path.is_symlink():
        if path.stat().st_size == size and _digest(path) == digest:
            return size
        path.unlink()
    part = path.with_name(f"{name}.part")
    if not part.is_file() or part.is_symlink() or part.stat().st_size > size:
        shutil.rmtree(path.parent, ignore_errors=True)
        return 0
    if part.stat().st_size < size:
        return part.stat().st_size
    if _digest(part) == digest:  # the process that received it was killed before it could name it
        part.rename(path)
        return size
    part.unlink()
    return 0


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def receive(store: Path, name: str, size: int, digest: str, stdin: IO[bytes]) -> None:
    """Store the bytes that are missing of a wheel. It gets its name only if the digest of the whole is right."""
    path = store / digest / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    part = path.with_name(f"{name}.part")
    with open(part, "ab") as file:
        left = size - file.tell()
        while left:
            chunk = stdin.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise Refusal("the connection ended before all wheels had arrived. Repeat the command: it continues")
            file.write(chunk)
            left -= len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if (found := _digest(part)) != digest:
        part.unlink()
        raise Refusal(
            f"{name} arrived with sha256 {found[:12]}, but wheelhouse.json records {digest[:12]}: the file was changed "
            "or is damaged. Nothing was installed. Repeat `t5-pretrain wheelhouse`, then this command"
        )
    part.rename(path)


def prune(store: Path, digests: set[str]) -> None:
    """Remove the wheels of other wheelhouses, as nothing needs them."""
    for path in store.iterdir():
        if path.is_dir() and path.name not in digests:
            shutil.rmtree(path, ignore_errors=True)
