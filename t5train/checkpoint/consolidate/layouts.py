"""Detect the layout of a checkpoint from the kinds of its files, and plan the result by the layout's rules.

The plan has each parameter once: its fp32 master, or its weight in the module if it has none, with the copies that must
match it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from t5train.checkpoint.consolidate import expert_masters, experts, module_states, pipeline, zero012, zero3
from t5train.checkpoint.consolidate.module_states import ModuleStates, ReadModule
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, StateFile, kind_of
from t5train.checkpoint.consolidate.optimizer_states import ParameterGroup, ReadGroups
from t5train.checkpoint.consolidate.plan import Location, Plan, Source, TensorPlan
from t5train.errors import ConsolidationError, IncompleteCheckpoint, UnknownLayout


class Layout(NamedTuple):
    """The rules of one layout: how to find the module's weights and the optimizer's masters."""

    module_states: ReadModule
    groups: ReadGroups


_Files = StateFile
_PIPELINE_ZERO0 = Layout(pipeline.module_states, pipeline.replicated)
_PIPELINE = Layout(pipeline.module_states, pipeline.partitioned)
LAYOUTS: dict[frozenset[StateFile], Layout] = {
    frozenset({_Files.MODEL}): Layout(module_states.module_states, zero012.replicated_groups),
    frozenset({_Files.MODEL, _Files.OPTIMIZER}): Layout(module_states.module_states, zero012.partitioned_groups),
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
        seen = [
            *foreign,
            *(kind.description for kind in StateFile if kind in kinds),
            *(f"the file {n}" for n in strangers),
        ]
        supported = "; ".join(
            " with ".join(kind.description for kind in StateFile if kind in known) for known in LAYOUTS
        )
        raise UnknownLayout(
            f"the layout of checkpoint {checkpoint.folder} is not supported: it holds "
            f"{', '.join(seen) or 'no DeepSpeed checkpoint'} ({', '.join(sorted(checkpoint.names)[:6])}). Supported "
            f"layouts: {supported}"
        )
    return LAYOUTS[kinds]


_FLOATING = frozenset({"F64", "F32", "BF16", "F16"})


def assemble(module: ModuleStates, groups: Sequence[ParameterGroup], moments: Sequence[str] = ()) -> Plan:
    """Return the plan of a checkpoint, from its module states and its parameter groups.

    A weight that is in no group is frozen, or the optimizer updates it in place. In both cases it is read from the
    module. ``moments`` names the optimizer's tensors to include, such as ``"exp_avg"``.
    """
    masters = _joined((group.masters() for group in groups), module)
    _require_named(module, masters)
    tensors = [_trained(name, master, _stored_as(name, module)) for name, master in masters.items()]
    tensors += [
        _untrained(name, weight, _stored_as(name, module)[1:], is_parameter=name not in module.buffers)
        for name, weight in module.weights.items()
        if name not in masters and name not in module.aliases
    ]
    return Plan(tensors, module.step, {key: _moments(groups, module, key) for key in moments})


def _joined(found: Iterable[Mapping[str, Location]], module: ModuleStates) -> dict[str, Location]:
    """Merge the masters of all groups. If several stages hold one, the others are the first one's copies."""
    joined: dict[str, Location] = {}
    for name, master in (item for masters in found for item in masters.items()):
        first = joined.setdefault(name, master)
        if first is not master:
            if name not in module.in_several_stages or first.shape != master.shape:
                raise ConsolidationError(
                    f"the optimizer states hold more than one fp32 master of {name}, and nothing shows which one is "
                    "right. Choose another tag"
                )
            joined[name] = replace(first, copies=(*first.copies, master.source))
    return joined


def _moments(groups: Sequence[ParameterGroup], module: ModuleStates, key: str) -> list[TensorPlan]:
    found = _joined((group.moments(key) for group in groups), module)
    if not found:
        raise UnknownLayout(
            f"cannot determine the positions of {key} (one of Adam's moments) in this checkpoint. Consolidate the "
            "checkpoint without moments"
        )
    return [TensorPlan(name, moment.shape, "F32", moment.source, moment.copies) for name, moment in found.items()]


def _require_named(module: ModuleStates, masters: Mapping[str, Location]) -> None:
    known = module.weights.keys() | module.without_values
    for name in masters:
        if name not in known:
            raise ConsolidationError(
                f"the files contradict each other: the optimizer states hold an fp32 master of {name}, but the model "
                "states hold no weight of that name. Choose another tag"
            )
        if name in module.aliases:
            raise ConsolidationError(
                f"the files contradict each other: {name} is recorded as tied to {module.aliases[name]}, but the "
                f"optimizer states hold a separate fp32 master of {name}. Choose another tag"
            )
    for alias, owner in module.aliases.items():
        if owner not in known:
            raise ConsolidationError(
                f"the files contradict each other: {alias} is recorded as tied to {owner}, but {owner} is missing in "
                "the model states. Choose another tag"
            )
    for name in sorted(module.without_values - masters.keys() - module.aliases.keys()):
        raise IncompleteCheckpoint(f"no file of the checkpoint holds the parameter {name}; choose another tag")


def _stored_as(owner: str, module: ModuleStates) -> list[Location]:
    """The weights that the module stores for a parameter: under its own name, then under its aliases."""
    names = [owner, *(alias for alias, name in module.aliases.items() if name == owner)]
    return [module.weights[name] for name in names if name in module.weights]


def _trained(name: str, master: Location, weights: Sequence[Location]) -> TensorPlan:
    _require_shape(name, master.shape, weights)
    return TensorPlan(name, master.shape, "F32", master.source, (*_sources(weights), *master.copies))


def _untrained(name: str, weight: Location, tied: Sequence[Location], *, is_parameter: bool) -> TensorPlan:
    _require_shape(name, weight.shape, tied)
    dtype = "F32" if weight.source.dtype in _FLOATING else weight.source.dtype
    copies = tuple(copy for copy in _sources([weight, *tied]) if copy != weight.source)
    return TensorPlan(name, weight.shape, dtype, weight.source, copies, is_parameter)


def _require_shape(name: str, shape: tuple[int, ...], weights: Sequence[Location]) -> None:
    for weight in weights:
        if weight.shape != shape:
            files = ", ".join(sorted({str(extent.file) for extent in weight.source.extents}))
            raise IncompleteCheckpoint(
                f"{files} belongs to another checkpoint: {name}, or a weight tied to {name}, has the shape "
                f"{weight.shape} there, but {shape} in the rest of the checkpoint. Choose another tag"
            )


def _sources(weights: Sequence[Location]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(source for weight in weights for source in (weight.source, *weight.copies)))
