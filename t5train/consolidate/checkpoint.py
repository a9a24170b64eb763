"""Finding the tag that is meant, and what may be trusted about it."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from t5train.consolidate.metadata import read_metadata
from t5train.consolidate.state_files import StateFile, numbered
from t5train.errors import ConsolidationError, IncompleteCheckpoint, InputError
from t5train.presence import is_folder, names_in
from t5train.progress import Progress
from t5train.sidecar import (
    Sidecar,
    complete_tags,
    files_of,
    huggingface_name,
    is_sidecar,
    read_all,
    require_complete,
)

LATEST = "latest"
_STATES = "_states.pt"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The folder of one tag. With sidecars it is ours, and every file named here has been verified."""

    folder: Path
    names: frozenset[str]
    sidecars: Sequence[Sidecar]
    _contents: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    def read(self, name: str) -> dict[str, Any]:
        """The structure of one of its files, read once; tensors stay where they are."""
        if name not in self._contents:
            self._contents[name] = read_metadata(self.folder / name)
        return self._contents[name]

    def first(self, kind: StateFile) -> str:
        """The file of a kind with the smallest numbers in its name; there is one."""
        return numbered(self.names, kind)[0][1]

    def files_by_rank(self, kind: StateFile, num_ranks: int, *stage: int) -> list[str]:
        """The files of a kind of which each of ``num_ranks`` ranks wrote one; IncompleteCheckpoint if one lacks.

        ``stage`` is that of a pipeline, where the files' names have it behind the rank.
        """
        found = [(numbers, name) for numbers, name in numbered(self.names, kind) if numbers[1:] == stage]
        ranks = [rank for (rank, *_), _ in found]
        if ranks != list(range(num_ranks)):
            raise IncompleteCheckpoint(
                f"{self.folder} was written by {num_ranks} data-parallel ranks; it holds {kind.value}: of ranks "
                f"{ranks}, it lacks ranks {sorted(set(range(num_ranks)) - set(ranks))}"
            )
        return [name for _, name in found]

    def result_name(self, name: str) -> str:
        """A name of the module as the result will have it: Hugging Face's where sidecars tell, else as it is."""
        if not self.sidecars:
            return name
        try:
            plain = huggingface_name(name, self.sidecars[0].model_prefix, self.sidecars[0].pipeline_layers)
        except ValueError as error:
            raise ConsolidationError(f"{self.folder}: {error}") from None
        for layer in self.sidecars[0].expert_layers:
            plain = layer.huggingface_name(plain)
        return plain


def open_checkpoint(checkpoint: Path, tag: str | None, progress: Progress) -> OpenedCheckpoint:
    """The checkpoint in ``checkpoint``, a save folder with tags inside or the folder of a tag.

    Without ``tag`` it is the newest complete tag by its sidecars. A checkpoint of another program has none:
    there ``latest`` chooses, and everything it leads to is still checked. Raises InputError when there is no such
    folder or tag, IncompleteCheckpoint when ranks or files are missing, altered or of different checkpoints, and
    errors of ``require_complete`` where that cannot be known.
    """
    folder = _tag_folder(checkpoint, tag)
    if not read_all(folder):
        return OpenedCheckpoint(folder, frozenset(name for name in names_in(folder) if name.endswith(_STATES)), ())
    sidecars = require_complete(folder, progress)
    return OpenedCheckpoint(folder, frozenset(files_of(sidecars)), sidecars)


@contextmanager
def refusing_what_vanishes(checkpoint: Path) -> Iterator[None]:
    """IncompleteCheckpoint when a file of the checkpoint is removed while it is read, as a run does with older tags."""
    try:
        yield
    except FileNotFoundError as error:
        if not error.filename or not Path(os.fsdecode(error.filename)).absolute().is_relative_to(checkpoint):
            raise
        raise IncompleteCheckpoint(
            f"{error.filename} was removed while {checkpoint} was read: a run in training removes older tags; choose "
            "the newest one, or one that the run keeps"
        ) from error


def _tag_folder(checkpoint: Path, tag: str | None) -> Path:
    if not checkpoint.is_dir():
        raise InputError(f"{checkpoint} is not a folder: name a DeepSpeed save folder or the folder of a tag")
    if _is_tag(checkpoint):
        if tag not in (None, checkpoint.name):
            raise InputError(f"{checkpoint} is the tag {checkpoint.name!r} itself, not {tag!r}")
        return checkpoint
    tags = [name for name in names_in(checkpoint) if is_folder(checkpoint / name) and _is_tag(checkpoint / name)]
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
    return any(is_sidecar(name) or name.endswith(_STATES) for name in names_in(folder))
