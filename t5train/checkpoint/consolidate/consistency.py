"""Checks that the files of a checkpoint belong together: ranks must record the same steps and learning rates."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from t5train.checkpoint.consolidate.plan import ITEM_BYTES
from t5train.checkpoint.consolidate.span_reader import Reader
from t5train.checkpoint.consolidate.torch_file import TORCH_DTYPES, StoredTensor
from t5train.errors import IncompleteCheckpoint


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
