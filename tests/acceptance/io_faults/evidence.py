"""What folders contain, found with hashlib and json alone: nothing here uses the code under test."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_BEING_REMOVED = re.compile(r"removed-.*|\..*\.discarded")
Tree = Mapping[str, str]
"""The sha256 of every file of a folder, by relative name."""


def tree(folder: Path) -> Tree:
    """The digests of files and links below a folder; empty if there is no such folder."""
    return {str(path.relative_to(folder)): digest_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def digest_of(path: Path) -> str:
    """The sha256 of a file; empty if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def missing(before: Mapping[str, Tree], folder: Path) -> list[str]:
    """Names of the folders in ``before`` that are lost: no folder, moved aside or not, has all their files unchanged.

    A folder may have gained files. A folder that is being removed does not count.
    """
    return [
        name for name, files in before.items() if not any(_has_files(each, files) for each in _candidates(name, folder))
    ]


def _candidates(name: str, folder: Path) -> Iterator[Path]:
    yield folder / name
    for parent, folders, _ in os.walk(folder):
        folders[:] = [each for each in folders if not _BEING_REMOVED.fullmatch(each)]
        yield from (Path(parent, each) for each in folders if Path(name).name in each)


def _has_files(folder: Path, files: Tree) -> bool:
    found = tree(folder)
    return files.items() <= found.items()


def complete_tags(checkpoints: Path) -> set[str]:
    """Tags that have the sidecars of all ranks of one save, and whose files have the digests in these sidecars."""
    return {path.name for path in checkpoints.glob("step-" + "[0-9]" * 8) if _is_complete(path)}


def _is_complete(tag: Path) -> bool:
    try:
        sidecars = [json.loads(path.read_text("utf-8")) for path in sorted(tag.glob("rank-*.json"))]
    except ValueError:
        return False
    if [sidecar["rank"] for sidecar in sidecars] != list(range(sidecars[0]["world_size"] if sidecars else 1)):
        return False
    if len({sidecar["saving"] for sidecar in sidecars}) != 1 or any(sidecar["tag"] != tag.name for sidecar in sidecars):
        return False
    found = tree(tag)
    return all(found.get(name) == each["sha256"] for sidecar in sidecars for name, each in sidecar["files"].items())
