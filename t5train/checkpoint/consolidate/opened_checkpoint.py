"""Open a checkpoint: choose the tag, classify its files, and check that they belong together.

A file's name shows what the file holds. ``mp_rank_00`` is the whole model. With pipeline or tensor
parallelism, each stage or rank has its own number instead.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from t5train.checkpoint import sidecar
from t5train.checkpoint.consolidate.plan import ITEM_BYTES
from t5train.checkpoint.consolidate.span_reader import Reader
from t5train.checkpoint.consolidate.torch_file import TORCH_DTYPES, StoredTensor, read_metadata
from t5train.checkpoint.sidecar import Sidecar, is_sidecar, read_all
from t5train.checkpoint.tags import complete_tags, files_of, require_complete
from t5train.errors import ConsolidationError, IncompleteCheckpoint, InputError
from t5train.files.presence import is_folder, names_in
from t5train.files.run_folder import tag_of
from t5train.model.parameters import huggingface_name, name_of_factor
from t5train.progress import Progress
from t5train.records.witness import WITNESS_FILES


class StateFile(Enum):
    """What a file holds: a description of a checkpoint with such files, for error messages, and its name's pattern."""

    MODEL = "model states in one file", r"mp_rank_00_model_states\.pt"
    RANK_MODEL = "model states of each rank (ZeRO 3)", r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt"
    OPTIMIZER = (
        "optimizer states of each data-parallel rank",
        r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt",
    )
    LAYER = "a pipeline", r"layer_(\d+)-model_states\.pt"
    EXPERT = "a mixture of experts", r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt"
    EXPERT_OPTIMIZER = "a mixture of experts (ZeRO 0)", r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt"
    OTHER_MODEL = "tensor or pipeline parallelism", r"mp_rank_(\d+)_model_states\.pt"
    OTHER_RANK_MODEL = ("tensor or pipeline parallelism (ZeRO 3)", r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
    OTHER_OPTIMIZER = (
        "tensor or pipeline parallelism (optimizer states)",
        r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt",
    )

    def __init__(self, description: str, pattern: str) -> None:
        self.description, self.pattern = description, pattern


def kind_of(name: str) -> StateFile | None:
    """The first kind whose pattern matches the name."""
    return next((kind for kind in StateFile if re.fullmatch(kind.pattern, name)), None)


def numbered(names: Iterable[str], kind: StateFile) -> list[tuple[tuple[int, ...], str]]:
    """The files of one kind with the numbers in their names (ranks, layers, experts), sorted by these."""
    matches = [re.fullmatch(kind.pattern, name) for name in names if kind_of(name) is kind]
    return sorted((tuple(map(int, match.groups())), match[0]) for match in matches if match)


LATEST = "latest"
_STATES = "_states.pt"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The folder of one tag. With sidecars, this project wrote it, and every file in ``names`` has been verified."""

    folder: Path
    names: frozenset[str]
    sidecars: Sequence[Sidecar]
    _contents: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    def read(self, name: str) -> dict[str, Any]:
        """The content of a file, with the position of each tensor instead of its data. A file is read only once."""
        if name not in self._contents:
            self._contents[name] = read_metadata(self.folder / name)
        return self._contents[name]

    def first(self, kind: StateFile) -> str:
        """The file of a kind with the smallest numbers in its name; there must be one."""
        return numbered(self.names, kind)[0][1]

    def files_by_rank(self, kind: StateFile, num_ranks: int, *stage: int) -> list[str]:
        """The files of a kind, in the order of ranks.

        Raises IncompleteCheckpoint unless there is one for each of ``num_ranks`` ranks. ``stage`` is the pipeline
        stage, if the files' names include it after the rank.
        """
        found = [(numbers, name) for numbers, name in numbered(self.names, kind) if numbers[1:] == stage]
        ranks = [rank for (rank, *_), _ in found]
        if ranks != list(range(num_ranks)):
            raise IncompleteCheckpoint(
                f"{self.folder} was written by {num_ranks} data-parallel ranks, but files of ranks "
                f"{sorted(set(range(num_ranks)) - set(ranks))} are missing. There are files of ranks {ranks} "
                f"({kind.description}). Choose another tag"
            )
        return [name for _, name in found]

    def result_name(self, name: str) -> str:
        """The name in the result for a name in the module: Hugging Face's if there are sidecars, else unchanged."""
        if not self.sidecars:
            return name
        try:
            plain = huggingface_name(name, self.sidecars[0].model_prefix, self.sidecars[0].pipeline_layers)
        except ValueError as error:
            raise ConsolidationError(
                f"{self.folder}: a parameter does not fit the names that the sidecars record: {error}. Choose another "
                "tag"
            ) from None
        for layer in self.sidecars[0].expert_layers:
            plain = layer.huggingface_name(plain)
        return name_of_factor(plain)


def open_checkpoint(checkpoint: Path, tag: str | None, progress: Progress) -> OpenedCheckpoint:
    """Open ``checkpoint``, a save folder with tags inside or the folder of one tag.

    Without ``tag``, the newest tag that is complete according to its sidecars is opened, or the best one as of it in
    runs whose result that is. A checkpoint that another
    program wrote has no sidecars. Then the file ``latest`` names the tag, and the layout's rules check its files.
    Raises InputError if there is no such folder or tag, IncompleteCheckpoint if ranks or files are missing, altered or
    from different checkpoints, and the errors of ``require_complete`` if this cannot be determined.
    """
    folder = _tag_folder(checkpoint, tag)
    if not read_all(folder):
        return OpenedCheckpoint(folder, frozenset(name for name in names_in(folder) if name.endswith(_STATES)), ())
    sidecars = require_complete(folder, progress)
    return OpenedCheckpoint(folder, frozenset(files_of(sidecars)).difference(WITNESS_FILES), sidecars)


@contextmanager
def refusing_what_vanishes(checkpoint: Path) -> Iterator[None]:
    """Raise IncompleteCheckpoint if a file of the checkpoint is removed while it is read. Runs remove older tags."""
    try:
        yield
    except FileNotFoundError as error:
        if not error.filename or not Path(os.fsdecode(error.filename)).absolute().is_relative_to(checkpoint):
            raise
        raise IncompleteCheckpoint(
            f"{error.filename} was removed while {checkpoint} was read: a run in training removes older tags. Choose "
            "the newest tag, or one that the run keeps (storage.keep_last, storage.keep_every_steps)"
        ) from error


@contextmanager
def naming_checkpoint(folder: Path) -> Iterator[None]:
    """Prefix a ConsolidationError that does not name the checkpoint with the checkpoint's folder.

    The caller may not have chosen the tag, and has to know which one not to choose again.
    """
    try:
        yield
    except ConsolidationError as error:
        if str(folder.absolute()) in str(error):
            raise
        raise type(error)(f"{folder.absolute()}: {error}") from error


def _tag_folder(checkpoint: Path, tag: str | None) -> Path:
    if not checkpoint.is_dir():
        raise InputError(f"{checkpoint} is not a folder: give a DeepSpeed save folder or the folder of a tag")
    if _is_tag(checkpoint):
        if tag not in (None, checkpoint.name):
            raise InputError(
                f"{checkpoint} is the folder of the tag {checkpoint.name!r}, but the tag {tag!r} was requested. Leave "
                f"out the tag, or give the folder {checkpoint.parent}"
            )
        return checkpoint
    tags = [name for name in names_in(checkpoint) if is_folder(checkpoint / name) and _is_tag(checkpoint / name)]
    chosen = tag if tag is not None else _default(checkpoint, tags)
    if chosen not in tags:
        raise InputError(f"{checkpoint} has no tag {chosen!r}: choose one of its tags {tags}")
    return checkpoint / chosen


def _default(checkpoint: Path, tags: Sequence[str]) -> str:
    complete = complete_tags(checkpoint)
    if complete:
        best_step = sidecar.read(checkpoint / complete[0], 0).best_step
        return complete[0] if best_step is None else tag_of(best_step)
    if any(read_all(checkpoint / tag) for tag in tags):
        raise IncompleteCheckpoint(
            f"{checkpoint} has no complete tag: {list(tags)} are unfinished or damaged. Restore their files, or train "
            "until the next checkpoint is saved"
        )
    if not tags:
        raise InputError(f"{checkpoint} holds no checkpoint: give a DeepSpeed save folder or the folder of a tag")
    latest = checkpoint / LATEST
    if not latest.is_file():
        raise InputError(
            f"{checkpoint} has no file {LATEST!r}, so it is unknown which tag is the newest. Choose one of the tags "
            f"{list(tags)}"
        )
    name = latest.read_text("utf-8", errors="replace").strip()
    if PurePosixPath(name).name != name:
        raise InputError(
            f"{latest} holds {name!r}, which is not the name of a tag: choose one of the tags {list(tags)}"
        )
    _log.warning("%s has no sidecars: using %s, the tag in %s", checkpoint, name, latest)
    return name


def _is_tag(folder: Path) -> bool:
    return any(is_sidecar(name) or name.endswith(_STATES) for name in names_in(folder))


def require_same(folder: Path, contents: Mapping[str, Mapping[str, Any]], keys: Iterable[str]) -> None:
    """Raise IncompleteCheckpoint unless all files have the same value for each key. ``contents`` is by file name."""
    (first, expected), *others = contents.items()
    for key in keys:
        for name, content in others:
            if content.get(key) != expected.get(key):
                raise IncompleteCheckpoint(
                    f"{folder} mixes files of different checkpoints: {first} and {name} differ in {key} "
                    f"({_shown(expected.get(key))} and {_shown(content.get(key))}). Choose another tag"
                )


def progress_of(optimizer: Any) -> dict[str, Any]:
    """Step counts and learning rates in an optimizer's state dictionary; empty for anything else."""
    if not isinstance(optimizer, Mapping):
        return {}
    groups = [group for group in optimizer.get("param_groups", ()) if isinstance(group, Mapping)]
    states = [state for state in optimizer.get("state", {}).values() if isinstance(state, Mapping)]
    counted = {_number(holder["step"]) for holder in [*groups, *states] if "step" in holder}
    return {
        "parameter groups": len(groups),
        "optimizer steps": sorted(counted),
        "learning rates": [_number(group.get("lr")) for group in groups],
    }


def _number(value: Any) -> Any:
    """The number in a tensor of one element, read from its file; any other value unchanged."""
    if not isinstance(value, StoredTensor) or value.num_elements != 1:
        return value
    data = bytearray(ITEM_BYTES[value.dtype])
    with Reader() as reader:
        reader.read(value.source(), 0, memoryview(data))
    return torch.frombuffer(data, dtype=TORCH_DTYPES[value.dtype]).item()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
