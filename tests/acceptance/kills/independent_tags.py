"""Which checkpoints are complete, judged with json and hashlib alone: nothing here uses the code under test."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_TAG = re.compile("step-[0-9]{8}")
_DIGESTS: dict[tuple[int, int, int, int], str] = {}


def find_complete_tags(checkpoint_folders: Sequence[Path]) -> set[str]:
    """Tags for which these folders together hold all sidecars of one save, and every file with its recorded sha256."""
    names = {
        path.name
        for folder in checkpoint_folders
        if folder.is_dir()
        for path in folder.iterdir()
        if _TAG.fullmatch(path.name)
    }
    return {name for name in names if _is_complete([folder / name for folder in checkpoint_folders])}


def files_of(folders: Sequence[Path]) -> dict[str, str]:
    """The recorded sha256 of each file that any sidecar in the folders of a tag names."""
    return {name: digest["sha256"] for sidecar in _sidecars(folders) for name, digest in sidecar["files"].items()}


def sha256_of(path: Path) -> str:
    """The sha256 of a file; empty if there is none.

    The digest is cached until the file is written again, also under its other names.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            written = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if written not in _DIGESTS:
                _DIGESTS[written] = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
    return _DIGESTS[written]


def tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file of a folder, by name."""
    return {str(path.relative_to(folder)): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _is_complete(folders: Sequence[Path]) -> bool:
    sidecars = list(_sidecars(folders))
    return any(_is_complete_save(saving, sidecars, folders) for saving in {sidecar["saving"] for sidecar in sidecars})


def _is_complete_save(saving: str, sidecars: Sequence[dict[str, Any]], folders: Sequence[Path]) -> bool:
    own = [sidecar for sidecar in sidecars if sidecar["saving"] == saving]
    if {sidecar["rank"] for sidecar in own} != set(range(own[0]["world_size"])):
        return False
    if any(sidecar["tag"] != folder.name for sidecar in own for folder in folders):
        return False
    files = {(name, digest["sha256"]) for sidecar in own for name, digest in sidecar["files"].items()}
    return all(any(sha256_of(folder / name) == sha256 for folder in folders) for name, sha256 in files)


def _sidecars(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in (path for folder in folders for path in sorted(folder.glob("rank-*.json"))):
        try:
            yield json.loads(path.read_text("utf-8"))
        except ValueError:  # half a sidecar does not count
            continue
