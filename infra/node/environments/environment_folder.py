"""The folder of an environment on a host: whose it is, and how it is made from wheels.

``.t5-pretrain.json`` in it names the wheelhouse that it is made of, and says whether it is complete. A folder without
that file is somebody else's and never touched. The file is there from the start, and says that the environment is
complete only when everything else is on disk.
"""

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.node.environments.installation_messages import Refusal, Working, locked, reply

MARKER = ".t5-pretrain.json"
_SHOWN_LINES = 4


def state(into: Path, wheelhouse: str) -> str:
    """``absent``, ``complete``, or ``unfinished``. Raises Refusal for a folder that was made by others or otherwise."""
    try:
        found = into.lstat()
    except FileNotFoundError:
        return "absent"
    if not stat.S_ISDIR(found.st_mode):
        raise Refusal(f"{into} exists and is not a folder; it was left as it is. Choose another --into")
    try:
        text = (into / MARKER).read_bytes()
        marker = json.loads(text) if text else {"wheelhouse": "", "complete": False}  # just created
        of, complete = str(marker["wheelhouse"]), bool(marker["complete"])
    except FileNotFoundError:
        if any(into.iterdir()):
            raise Refusal(
                f"{into} exists and was not made by this command; it was left as it is. Choose another --into"
            ) from None
        return "absent"
    except (ValueError, KeyError, TypeError):
        raise Refusal(f"{into / MARKER} is damaged; nothing was changed. Remove {into}, or choose another") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise Refusal(f"other users can change {into}. Choose another --into, or make it private (chmod go-w)")
    if complete and of != wheelhouse:
        raise Refusal(
            f"{into} is an environment of another wheelhouse ({of[:12]}); it was left as it is. Choose another --into"
        )
    return "complete" if complete else "unfinished"


@contextmanager
def claimed(into: Path, wheelhouse: str) -> Iterator[bool]:
    """Yield whether the environment has to be made, with its folder reserved, and empty but for the marker.

    Several hosts can share the folder: one makes it, others wait. If the block fails, the folder is removed.
    """
    _make_parents(into)
    into.mkdir(mode=0o700, exist_ok=True)
    if state(into, wheelhouse) == "absent":  # now it is an empty folder
        with suppress(FileExistsError):  # another host was faster
            descriptor = os.open(into / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w") as file:
                file.write(_marker_text(wheelhouse, complete=False))
                file.flush()
                os.fsync(file.fileno())
    with locked(into / MARKER, f"another host to make {into}"):
        if state(into, wheelhouse) == "complete":
            yield False
            return
        _empty(into)
        try:
            yield True
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise


def _make_parents(into: Path) -> None:
    """Create the parents, private if they are new. Others must not be able to replace the environment's folder."""
    into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = into.parent.stat()
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        raise Refusal(f"every user can replace what is in {into.parent}. Choose another --into, or make it private")


def _marker_text(wheelhouse: str, *, complete: bool) -> str:
    return json.dumps({"wheelhouse": wheelhouse, "complete": complete}) + "\n"


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != MARKER:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def fill(wheelhouse: str, wheels: Sequence[tuple[Path, str]], listed: Path, into: Path) -> None:
    """Make the environment and install the wheels, whose digests pip verifies again. The marker is completed last.

    ``listed`` is a file for pip's list of wheels.
    """
    reply(Working("creating the environment"))
    _run([sys.executable, "-I", "-m", "venv", str(into)], "the environment cannot be created")
    python = into / "bin" / "python"
    listed.write_text("".join(f"{path.as_uri()} --hash=sha256:{digest}\n" for path, digest in wheels))
    reply(Working(f"wheels to install: {len(wheels)}"))
    offline = ["--no-index", "--no-cache-dir", "--only-binary=:all:", "--require-hashes", "--no-input"]
    words = ["install", *offline, "--disable-pip-version-check", "--quiet", f"--requirement={listed}"]
    _run([str(python), "-I", "-m", "pip", *words], "the wheels cannot be installed")
    _sync_disk(into)
    new = into / f"{MARKER}.new"
    new.write_text(_marker_text(wheelhouse, complete=True))
    with open(new, "rb") as file:
        os.fsync(file.fileno())
    new.replace(into / MARKER)
    descriptor = os.open(into, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def _sync_disk(folder: Path) -> None:
    """Wait until what was written to the file system of a folder is on its disk: the marker comes last there, too."""
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
        raise Refusal(f"{otherwise}: {' / '.join(lines[-_SHOWN_LINES:]) or f'exit code {done.returncode}'}")
