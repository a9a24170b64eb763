"""Whether this machine can be several hosts, and if not, why."""

import os
import shutil
import subprocess

from infra.testcluster import namespaces

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
"""The programs that are used, and the Debian package of each."""


def what_is_missing() -> str | None:
    """Why no test cluster can be had here, with the remedy; None if it can."""
    if os.geteuid() != 0:
        return "only root can make namespaces: run it as root (sudo, or a container with --privileged)"
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    lacking = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=path)})
    if lacking:
        return f"Debian packages are missing: apt-get install {' '.join(lacking)}"
    tried = subprocess.run(["unshare", *namespaces.HOST, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no namespaces can be made here ({tried.stderr.strip()}): a container must be started with --privileged"
    return None
