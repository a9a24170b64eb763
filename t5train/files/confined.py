"""Confine names from outside (listings, archives, manifests, other hosts) to the folder they are meant for.

Standard library only, as nodes import it.
"""

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from t5train.errors import StorageError, T5TrainError

_MAX_PART_BYTES = 200  # file systems allow 255, and temporary files have longer names
_MAX_NAME_BYTES = 2048
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")
_DRIVE = re.compile(r"[A-Za-z]:")


def confined(folder: Path, name: str, source: str, kind: type[T5TrainError] = StorageError) -> Path:
    """Return ``folder / name``. Raises ``kind``, naming ``source``, if the name is unsafe or leads out of the folder.

    A name must be a relative POSIX path, such as ``a/b.txt``. Symbolic links within the folder are not resolved.
    """
    if (fault := _fault(name)) is not None:
        raise kind(f"{source} names {_shown(name)}, which {fault}. Do not use that data until you know why")
    return folder / name


def child(folder: Path, name: str, source: str, kind: type[T5TrainError] = StorageError) -> Path:
    """As ``confined``, for the name of a file or folder directly in the folder."""
    if "/" in name:
        raise kind(f"{source} names {_shown(name)}, which is not the plain name of a file or folder")
    return confined(folder, name, source, kind)


def require_distinct(names: Iterable[str], source: str, kind: type[T5TrainError] = StorageError) -> None:
    """Raise ``kind`` if two names differ only in case or in how accents are encoded: some file systems confuse them."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if key in seen:
            raise kind(
                f"{source} names both {_shown(seen[key])} and {_shown(name)}, which are the same on some file systems. "
                "Rename one of the two"
            )
        seen[key] = name


def _fault(name: str) -> str | None:
    """What is wrong with a name; None if it is valid."""
    parts = name.split("/")
    faults = {
        "is not a relative path": name.startswith("/") or _DRIVE.match(name),
        "leads out of its folder, or to the folder itself": {".", ".."} & set(parts),
        "has an empty part": "" in parts,
        "has a control character or a backslash": _UNFIT.search(name),
        "is not valid Unicode": not _is_encodable(name),
        f"is too long (at most {_MAX_PART_BYTES} bytes a part, {_MAX_NAME_BYTES} in all)": _is_too_long(parts),
    }
    return next((fault for fault, is_so in faults.items() if is_so), None)


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _is_too_long(parts: list[str]) -> bool:
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    return max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(sizes) > _MAX_NAME_BYTES


def _shown(name: str, most: int = 120) -> str:
    shown = ascii(name)
    return shown if len(shown) <= most else f"{shown[:most]}..."
