"""Installs a wheelhouse into a new environment on a host that has only Python and sshd: this module is run with -c.

The first line of stdin is a ``Job``. The answer is ``Wanted``, with the wheels that the head must send and how much of
each is already here; their bytes follow on stdin. ``Working`` says what happens meanwhile. The last line is ``Ended``
or ``Refused``. If stdin ends before that, the head has ended, and so does the installation.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, NoReturn

from infra.node.environments.environment_folder import claimed, fill, state
from infra.node.environments.installation_messages import Ended, Job, Refusal, Refused, Wanted, locked, reply
from infra.node.environments.wheel_store import held_bytes, private_store, prune, receive

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+!-]{0,195}\.whl", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SPARE_BYTES = 200 << 20  # pip, caches of compiled modules, and temporary files


def install(job: Job, stdin: IO[bytes]) -> bool:
    """Make the environment unless it is there; returns whether it is new."""
    _require_valid(job)
    into = Path(job.into)
    if state(into, job.wheelhouse) == "complete":
        reply(Wanted({}))
        return False
    _require_venv(job.python)
    store = private_store(Path(job.store))
    with locked(store, "another installation to end on this host"):
        held = {name: held_bytes(store, name, size, digest) for name, size, digest in job.wheels}
        starts = {name: held[name] for name, size, _ in job.wheels if held[name] < size}
        arriving = sum(size - held[name] for name, size, _ in job.wheels)
        with claimed(into, job.wheelhouse) as is_new:
            if is_new:  # what an interrupted installation left is gone
                _require_space(store, into, arriving, job.unpacked_bytes)
            reply(Wanted(starts if is_new else {}))
            if is_new:
                for name, size, digest in job.wheels:
                    if name in starts:
                        receive(store, name, size, digest, stdin)
                _end_with_head(stdin)
                wheels = [(store / digest / name, digest) for name, _, digest in job.wheels]
                fill(job.wheelhouse, wheels, store / "requirements.txt", into)
                prune(store, {digest for _, _, digest in job.wheels})
            return is_new


def _require_valid(job: Job) -> None:
    """The head has checked this, too; a host believes nobody."""
    if os.getuid() != job.user:
        raise Refusal(
            f"the user id is {os.getuid()} on this host and {job.user} on the head. Give both accounts the same id, or "
            "set cluster.ssh_user"
        )
    for name, size, digest in job.wheels:
        if not (_NAME.fullmatch(name) and _DIGEST.fullmatch(digest) and size >= 0):
            raise Refusal(f"{name!r} is not the plain name of a wheel with its digest. Make the wheelhouse again")
    if not job.into.startswith("/") or Path(job.into) in {Path("/"), *Path(job.store).parents}:
        raise Refusal(f"{job.into!r} cannot be the folder of an environment. Choose another --into")


def _require_venv(python: str) -> None:
    if f"{sys.version_info.major}.{sys.version_info.minor}" != python:
        raise Refusal(f"the Python here is {sys.version.split()[0]}, the wheels are for {python}")
    probe = subprocess.run(
        [sys.executable, "-I", "-c", "import venv, ensurepip"],
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if probe.returncode:
        raise Refusal(
            f"{sys.executable} has no venv module. Install it there (Debian and Ubuntu: package python{python}-venv)"
        )


def _require_space(store: Path, into: Path, arriving_bytes: int, unpacked_bytes: int) -> None:
    """Raise Refusal if a disk is too small; both folders may be on the same one."""
    needed: dict[int, tuple[Path, int]] = {}
    for place, size in ((store, arriving_bytes), (_nearest(into), unpacked_bytes + _SPARE_BYTES)):
        device = place.stat().st_dev
        needed[device] = (place, needed.get(device, (place, 0))[1] + size)
    for place, size in needed.values():
        free = shutil.disk_usage(place).free
        if free < size:
            raise Refusal(
                f"the disk of {place} has {free / 1e9:.1f} GB free, and the environment needs {size / 1e9:.1f} GB. "
                "Free some space there, or choose another --into"
            )


def _nearest(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def _end_with_head(stdin: IO[bytes]) -> None:
    """End this process and what it has started when the head closes its end. The marker then says: unfinished."""

    def watch() -> NoReturn:
        os.read(stdin.fileno(), 1)  # unlike stdin.read, it holds no lock that Python needs when it ends
        os.killpg(os.getpgid(0), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Carry out the head's job."""
    os.umask(0o077)
    os.chdir("/")
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    stdin = sys.stdin.buffer
    fields = json.loads(stdin.readline())[Job.__name__]
    try:
        is_new = install(Job(**fields), stdin)
    except Refusal as refusal:
        reply(Refused(str(refusal)))
    except OSError as error:
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "Free space or inodes there" if is_full else "Check its permissions, and `dmesg` for a disk error"
        reply(Refused(f"{error.filename or fields['into']}: {error.strerror or error}. {remedy}, then repeat"))
    else:
        reply(Ended(is_new))


if __name__ == "__main__":
    main()
