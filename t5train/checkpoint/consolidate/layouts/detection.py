"""Detect the layout of a checkpoint from the kinds of files it has, and look up the rules for reading it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from t5train.checkpoint.consolidate.layouts import (
    expert_masters,
    experts,
    module_states,
    pipeline,
    pipeline_masters,
    zero0,
    zero3,
    zero12,
)
from t5train.checkpoint.consolidate.layouts.assembly import assemble
from t5train.checkpoint.consolidate.layouts.module_states import ReadModule
from t5train.checkpoint.consolidate.layouts.optimizer_states import ReadGroups
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, StateFile, kind_of
from t5train.checkpoint.consolidate.plan import Plan
from t5train.errors import UnknownLayout


class Layout(NamedTuple):
    """The rules of one layout: how to find the module's weights and the optimizer's masters."""

    module_states: ReadModule
    groups: ReadGroups


_Files = StateFile
_PIPELINE_ZERO0 = Layout(pipeline.module_states, pipeline_masters.replicated)
_PIPELINE = Layout(pipeline.module_states, pipeline_masters.partitioned)
LAYOUTS: dict[frozenset[StateFile], Layout] = {
    frozenset({_Files.MODEL}): Layout(module_states.module_states, zero0.groups),
    frozenset({_Files.MODEL, _Files.OPTIMIZER}): Layout(module_states.module_states, zero12.groups),
    frozenset({_Files.RANK_MODEL, _Files.OPTIMIZER}): Layout(zero3.module_states, zero3.groups),
    frozenset({_Files.MODEL, _Files.EXPERT, _Files.OPTIMIZER}): Layout(
        experts.module_states, expert_masters.partitioned_groups
    ),
    frozenset({_Files.MODEL, _Files.EXPERT, _Files.EXPERT_OPTIMIZER}): Layout(
        experts.module_states, expert_masters.replicated_groups
    ),
    frozenset({_Files.MODEL, _Files.LAYER}): _PIPELINE_ZERO0,
    frozenset({_Files.MODEL, _Files.LAYER, _Files.OTHER_MODEL}): _PIPELINE_ZERO0,
    frozenset({_Files.MODEL, _Files.LAYER, _Files.OPTIMIZER}): _PIPELINE,
    frozenset({_Files.MODEL, _Files.LAYER, _Files.OPTIMIZER, _Files.OTHER_OPTIMIZER}): _PIPELINE,
    frozenset({_Files.MODEL, _Files.LAYER, _Files.OPTIMIZER, _Files.OTHER_OPTIMIZER, _Files.OTHER_MODEL}): _PIPELINE,
}

_FOREIGN_FOLDERS = {"zero": "a universal checkpoint", "offloaded_tensors": "an optimizer offloaded to NVMe"}


def plan_of(checkpoint: OpenedCheckpoint, moments: Sequence[str] = ()) -> Plan:
    """Return the plan of a checkpoint: where each of its tensors is stored.

    ``moments`` names the optimizer's tensors to include beside the weights. Raises UnknownLayout, naming what was
    found, if the layout is not supported.
    """
    layout = _layout_of(checkpoint)
    module = layout.module_states(checkpoint)
    return assemble(module, layout.groups(checkpoint, module), moments)


def _layout_of(checkpoint: OpenedCheckpoint) -> Layout:
    foreign = [what for name, what in _FOREIGN_FOLDERS.items() if (checkpoint.folder / name).is_dir()]
    kinds = frozenset(kind for name in checkpoint.names if (kind := kind_of(name)))
    strangers = sorted(name for name in checkpoint.names if kind_of(name) is None)
    if foreign or strangers or kinds not in LAYOUTS:
        seen = [*foreign, *(kind.value for kind in StateFile if kind in kinds), *(f"the file {n}" for n in strangers)]
        raise UnknownLayout(
            f"the layout of checkpoint {checkpoint.folder} is not supported: it holds "
            f"{', '.join(seen) or 'no DeepSpeed checkpoint'} ({', '.join(sorted(checkpoint.names)[:6])}). Supported "
            f"layouts: {_supported_layouts()}"
        )
    return LAYOUTS[kinds]


def _supported_layouts() -> str:
    return "; ".join(_described(kinds) for kinds in LAYOUTS)


def _described(kinds: Iterable[StateFile]) -> str:
    return " with ".join(kind.value for kind in StateFile if kind in kinds)
