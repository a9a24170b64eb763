"""Takes the head's code on a host that has none of it yet, so this text is run there by ``python -c``.

It is told a line of JSON on stdin: the id of the ``user``, the ``place`` of the node folder (infra.node.node_folders)
and the ``digest`` of a bundle (infra.node.code_bundle). Then comes the bundle itself, or nothing to ask whether it is
there already. It answers whether it is there now, whole, in ``{place}/code/{digest}``. What somebody has changed there
is replaced. Standard library only, and nothing of ours.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path

_MODULE = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*/)+[A-Za-z_][A-Za-z0-9_]*\.py")
_COMPILED = "__pycache__"


def hold(user: int, place: Path, digest: str, content: bytes) -> bool:
    """Whether this code is here; with ``content`` it is put here if it is not. SystemExit says why it cannot be."""
    if os.getuid() != user:
        sys.exit(
            f"the user has the id {os.getuid()} there and {user} on the head: let it be the same, or set "
            "cluster.ssh_user"
        )
    sources = _verified(content, digest) if content else {}
    code = _private(_private(place) / "code")
    lock = os.open(code, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another head may be about to do the same
        if not (held := _is_whole(code / digest, digest)) and sources:
            _put(sources, code / digest)
        if held or sources:
            os.utime(code / digest)  # when it was last wanted
        return held or bool(sources)
    finally:
        os.close(lock)


def _verified(content: bytes, digest: str) -> dict[str, str]:
    """Sources by name; nothing is taken from bytes before they are known to be the right ones."""
    if hashlib.sha256(content).hexdigest() != digest:
        sys.exit(f"the head's code {digest[:12]} came damaged, {len(content)} bytes of it: start again")
    sources: dict[str, str] = json.loads(content)
    for name in sources:
        if not _MODULE.fullmatch(name):
            sys.exit(f"the head's code {digest[:12]} has {name!r}, which is not the path of a module: rename it")
    return sources


def _private(folder: Path) -> Path:
    """As t5train.files.locks: made for its owner alone, and neither a link nor another's, nor open to others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        sys.exit(f"{folder} is not a folder of user {os.getuid()} alone: move it away")
    return folder


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether just this code can be imported from there."""
    if not os.path.lexists(folder) or not _is_private(folder):
        return False
    found = [path for path in folder.rglob("*") if _COMPILED not in path.parts]
    if any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in found):
        return False
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found if path.is_file()}
    sources = {name: content.decode("utf-8", "replace") for name, content in files.items()}
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest() == digest


def _put(sources: dict[str, str], folder: Path) -> None:
    """Written aside, and on disk before it has its name."""
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
    """Answer the head."""
    os.umask(0o077)
    request, content = json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer.read()
    try:
        held = hold(request["user"], Path(request["place"]), request["digest"], content)
    except OSError as error:
        sys.exit(f"the head's code cannot be kept in {request['place']}: {error}; make room, or repair its permissions")
    sys.stdout.write(json.dumps({"held": held}) + "\n")


if __name__ == "__main__":
    main()
