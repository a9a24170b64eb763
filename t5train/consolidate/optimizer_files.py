"""The optimizer states of data-parallel ranks: one file a rank, of one step, with flat masters and their moments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.consolidate.agreement import progress_of, require_same
from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.masters import Partition
from t5train.consolidate.metadata import StoredTensor
from t5train.errors import UnknownLayout


@dataclass(frozen=True)
class OptimizerKeys:
    """Where a file keeps the flat masters, and where the state of the optimizer inside DeepSpeed's."""

    masters: str
    inner: str


def read_optimizers(
    checkpoint: OpenedCheckpoint, names: Sequence[str], keys: OptimizerKeys, same: Sequence[str]
) -> list[dict[str, Any]]:
    """The content of each rank's file; IncompleteCheckpoint unless all have equal steps, rates and ``same`` keys."""
    states = [_optimizer(checkpoint, name, keys) for name in names]
    versions = {name: checkpoint.read(name) for name in names}
    require_same(checkpoint.folder, versions, ["ds_version"])
    require_same(checkpoint.folder, dict(zip(names, states, strict=True)), same)
    progress = {name: progress_of(state.get(keys.inner)) for name, state in zip(names, states, strict=True)}
    require_same(checkpoint.folder, progress, ["parameter groups", "optimizer steps", "learning rates"])
    lengths = {
        name: {"number of flat masters": len(state[keys.masters])} for name, state in zip(names, states, strict=True)
    }
    require_same(checkpoint.folder, lengths, ["number of flat masters"])
    return states


def partition_of(state: Mapping[str, Any], keys: OptimizerKeys, index: int) -> Partition:
    """One of a rank's flat masters, with the optimizer's state of it."""
    masters = state[keys.masters]
    stored = masters[index]
    if not isinstance(stored, StoredTensor):
        raise UnknownLayout(f"the masters of group {index} are a {type(stored).__name__}, not a tensor")
    return Partition(stored, inner_states(state.get(keys.inner), len(masters))[index])


def inner_states(optimizer: Any, count: int) -> list[Mapping[str, Any]]:
    """What an optimizer's state dictionary holds of each of ``count`` tensors; nothing where that cannot be told."""
    if isinstance(optimizer, list) and len(optimizer) == count:
        return [state if isinstance(state, Mapping) else {} for state in optimizer]
    if not isinstance(optimizer, Mapping) or "state" not in optimizer:
        return [{}] * count
    numbers = [number for group in optimizer.get("param_groups", ()) for number in group.get("params", ())]
    if len(numbers) != count:
        return [{}] * count
    return [optimizer["state"].get(number, {}) for number in numbers]


def _optimizer(checkpoint: OpenedCheckpoint, name: str, keys: OptimizerKeys) -> dict[str, Any]:
    state = checkpoint.read(name).get("optimizer_state_dict")
    if not isinstance(state, dict) or not isinstance(state.get(keys.masters), list):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise UnknownLayout(f"{checkpoint.folder / name} holds no {keys.masters}; it holds {found}")
    if "ds_zero_partition_groups" in state:
        raise UnknownLayout(
            f"{checkpoint.folder / name} tells of AutoEP's expert partitions: no rule is known for that"
        )
    return state
