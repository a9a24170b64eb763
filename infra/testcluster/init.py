"""The first process of a host: makes the host's view of the files, then adopts and reaps what lost its parent.

Started by infra.testcluster.host in new namespaces, with JSON on standard input: ``host``, ``record`` (where to
say which process this is) and ``mounts``. Prints a line once the host is ready. All of the host ends with it.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from infra.processes import ProcessIdentity
from infra.testcluster import mounts
from infra.testcluster.mounts import Mount


def main() -> NoReturn:
    """Be a host until killed."""
    wanted = json.load(sys.stdin)
    _record(Path(wanted["record"]))
    socket.sethostname(wanted["host"])
    mounts.freeze()
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm")):  # noqa: S108 - the host's own
        mounts.mount_file_system(kind, target)
    mounts.bind(Mount(**mount) for mount in wanted["mounts"])
    os.chdir("/root")
    print("ready", flush=True)  # noqa: T201 - whoever started this process reads it
    _reap()


def _record(path: Path) -> None:
    """Write the pid that this process has outside: /proc is still the machine's."""
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
        with suppress(ChildProcessError):  # it has none at the moment
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
