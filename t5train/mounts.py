"""The file systems that are mounted on this machine. Standard library only, as guards import it."""

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    "nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|9p|afs|gfs2|ocfs2|orangefs|panfs|pvfs2|virtiofs|wekafs|fuse[.].*"
)


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4`` or ``nfs4``."""
    real, found, longest = os.path.realpath(path), "unknown", ""
    for line in _MOUNTS.read_text("utf-8", "replace").splitlines():
        before, _, after = line.partition(" - ")
        mounted_on = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        is_above = real == mounted_on or real.startswith(mounted_on.rstrip("/") + "/")
        if is_above and len(mounted_on) >= len(longest):  # of two at one place, the later one covers the other
            found, longest = after.split()[0], mounted_on
    return found


def is_network_file_system(path: Path) -> bool:
    """Whether other machines may have the same files."""
    return _NETWORK.fullmatch(file_system(path)) is not None
