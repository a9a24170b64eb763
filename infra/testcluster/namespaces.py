"""Starts processes in new namespaces, for a host or the switch, and checks that this machine can make namespaces."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import IO, cast

from infra.testcluster import registry
from t5train.errors import TestClusterError

HOST = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
SWITCH = ("--net",)
_CODE = str(Path(__file__).parents[2])


def start(
    cluster: str, kinds: tuple[str, ...], argv: list[str], wanted: bytes, console: Path
) -> subprocess.Popen[bytes]:
    """Start a program that reads ``wanted`` and prints a line once it is ready. Call ``await_ready`` next."""
    state = registry.read(cluster)
    prefix = ["setpriv", "--pdeathsig", "KILL"] if state.temporary else []
    with open(console, "wb") as errors:
        process = subprocess.Popen(
            [*prefix, "unshare", *kinds, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=state.environment | registry.mark(cluster) | {"PYTHONPATH": _CODE},
            start_new_session=True,  # Ctrl-C in a terminal must not reach hosts
        )
    with cast(IO[bytes], process.stdin) as stdin:
        stdin.write(wanted)
    return process


def await_ready(process: subprocess.Popen[bytes], console: Path) -> None:
    """Wait until a program prints that line. Raises TestClusterError, with its console output, if it ends before."""
    with cast(IO[bytes], process.stdout) as output:
        if output.readline():
            return
    said = console.read_text("utf-8", "replace")[-2000:]
    raise TestClusterError(f"{console.parent.name} did not start: {said or 'it wrote nothing to its console'}")


PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
}
"""The programs that a test cluster uses, and the Debian package of each."""


def what_is_missing() -> str | None:
    """Why this machine cannot run a test cluster, with the remedy; None if it can."""
    if os.geteuid() != 0:
        return "only root can make namespaces: run this as root (sudo, or a container with --privileged)"
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    lacking = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=path)})
    if lacking:
        return f"Debian packages are missing: apt-get install {' '.join(lacking)}"
    tried = subprocess.run(["unshare", *HOST, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"cannot make namespaces ({tried.stderr.strip()}): if this is a container, start it with --privileged"
    return None
