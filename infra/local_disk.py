"""Whether a folder is on a disk of this machine alone. Standard library only, as nodes import it."""

import re
from pathlib import Path

# Of others, such as nfs, lustre, cifs and fuse, other machines may have files open that no process here has.
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def is_on_local_disk(path: Path) -> bool:
    """Whether the file system of a path is of a kind that only one machine mounts."""
    return _file_system(path.resolve()) in _LOCAL


def _file_system(path: Path) -> str:
    """That of the deepest mount point above the path; of several there, the last one hides the others."""
    found = (0, "")
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        fields, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split(" ")[4]))
        if path.is_relative_to(point) and len(point.parts) >= found[0]:
            found = (len(point.parts), after.split(" ")[0])
    return found[1]
