"""Finding the tag that is meant, and what may be trusted about it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from t5train.consolidate.metadata import read_metadata
from t5train.errors import IncompleteCheckpoint, InputError
from t5train.progress import Progress
from t5train.sidecar import Sidecar, complete_tags, files_of, read_all, require_complete

LATEST = "latest"
_STATES = "*_states.pt"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The folder of one tag. With sidecars it is ours, and every file named here has been verified."""

    folder: Path
    names: frozenset[str]
    sidecars: Sequence[Sidecar]

    def read(self, name: str) -> dict[str, Any]:
        """The structure of one of its files; tensors stay where they are."""
        return read_metadata(self.folder / name)


def open_checkpoint(checkpoint: Path, tag: str | None, progress: Progress) -> OpenedCheckpoint:
    """The checkpoint in ``checkpoint``, a save folder with tags inside or the folder of a tag.

    Without ``tag`` it is the newest complete tag by its sidecars. A checkpoint of another program has none:
    there ``latest`` chooses, and everything it leads to is still checked. Raises InputError when there is no such
    folder or tag, IncompleteCheckpoint when ranks or files are missing, altered or of different checkpoints.
    """
    folder = _tag_folder(checkpoint, tag)
    if not read_all(folder):
        return OpenedCheckpoint(folder, frozenset(path.name for path in folder.glob(_STATES)), ())
    sidecars = require_complete(folder, progress)
    return OpenedCheckpoint(folder, frozenset(files_of(sidecars)), sidecars)


def _tag_folder(checkpoint: Path, tag: str | None) -> Path:
    if not checkpoint.is_dir():
        raise InputError(f"{checkpoint} is not a folder: name a DeepSpeed save folder or the folder of a tag")
    if _is_tag(checkpoint):
        if tag not in (None, checkpoint.name):
            raise InputError(f"{checkpoint} is the tag {checkpoint.name!r} itself, not {tag!r}")
        return checkpoint
    tags = sorted(path.name for path in checkpoint.iterdir() if path.is_dir() and _is_tag(path))
    chosen = tag if tag is not None else _newest(checkpoint, tags)
    if chosen not in tags:
        raise InputError(f"{checkpoint} has no tag {chosen!r}; it has {tags}")
    return checkpoint / chosen


def _newest(checkpoint: Path, tags: Sequence[str]) -> str:
    complete = complete_tags(checkpoint)
    if complete:
        return complete[0]
    if any(read_all(checkpoint / tag) for tag in tags):
        raise IncompleteCheckpoint(f"{checkpoint} has no complete tag; unfinished or damaged: {list(tags)}")
    if not tags:
        raise InputError(f"{checkpoint} holds no checkpoint: name a DeepSpeed save folder or the folder of a tag")
    latest = checkpoint / LATEST
    if not latest.is_file():
        raise InputError(f"{checkpoint} has no file {LATEST!r}: say which tag is meant, of {list(tags)}")
    name = latest.read_text("utf-8", errors="replace").strip()
    if PurePosixPath(name).name != name:
        raise InputError(
            f"{latest} holds {name!r}, which is not the name of a tag: say which is meant, of {list(tags)}"
        )
    _log.warning("%s has no sidecars: %s, named by %s, is taken", checkpoint, name, latest)
    return name


def _is_tag(folder: Path) -> bool:
    return any(folder.glob("rank-*.json")) or any(folder.glob(_STATES))
