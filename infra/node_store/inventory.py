"""What a place holds of a run's checkpoints: a node's own disk, or the gathered copy on the head.

Standard library only, as nodes import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SIDECARS = "rank-*.json"
HEAD = ""
"""Place of the gathered copy; other places are names of hosts."""


@dataclass(frozen=True)
class Copy:
    """What a place holds of a tag: text of sidecars, and size in bytes of all other files, by name."""

    sidecars: Mapping[str, str]
    files: Mapping[str, int]


Inventory = Mapping[str, Copy]
"""By tag."""


def inventory_of(checkpoints: Path) -> Inventory:
    """What lies in a folder of checkpoints; nothing where there is none, or of what is being written or removed."""
    if not checkpoints.is_dir():
        return {}
    return {each.name: _copy_of(each) for each in sorted(checkpoints.iterdir()) if _is_tag(each)}


def _is_tag(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _copy_of(folder: Path) -> Copy:
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    texts = {path.name: path.read_text("utf-8", "replace") for path in files if path.match(_SIDECARS)}
    return Copy(texts, {path.name: path.stat().st_size for path in files if path.name not in texts})
