"""What a place holds of a run's checkpoints: a node's own disk, or the gathered copy on the head.

Standard library only, as nodes import it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from t5train.errors import Unreadable
from t5train.presence import ABSENT, file_size, is_folder, names_in, reading

_SIDECAR = re.compile(r"rank-.*\.json")
HEAD = ""
"""Place of the gathered copy; other places are names of hosts."""


@dataclass(frozen=True)
class Copy:
    """What a place holds of a tag: text of sidecars, and size in bytes of all other files, by name."""

    sidecars: Mapping[str, str]
    files: Mapping[str, int]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """What cannot be read there now, and why; of the name ``""`` is the folder itself."""


Inventory = Mapping[str, Copy]
"""By tag."""


def inventory_of(checkpoints: Path) -> Inventory:
    """What lies in a folder of checkpoints; nothing where there is none, or of what is being written or removed.

    Raises Unreadable when the folder itself cannot be listed.
    """
    tags = {name: _copy_of(checkpoints / name) for name in names_in(checkpoints) if not name.startswith(".")}
    return {name: copy for name, copy in tags.items() if copy is not None}


def _copy_of(folder: Path) -> Copy | None:
    texts, sizes, unreadable = dict[str, str](), dict[str, int](), dict[str, str]()
    try:
        if not is_folder(folder):
            return None
        names = [name for name in names_in(folder) if not name.startswith(".")]
    except Unreadable as error:
        return Copy({}, {}, {"": str(error)})
    for name in names:
        try:
            if _SIDECAR.fullmatch(name):
                with reading(folder / name):
                    texts[name] = (folder / name).read_text("utf-8", "replace")
            elif (size := file_size(folder / name)) is not None:
                sizes[name] = size
        except Unreadable as error:
            unreadable[name] = str(error)
        except ABSENT:
            continue  # removed since the folder was listed
    return Copy(texts, sizes, unreadable)
