"""Plan from the module's states and the optimizer's masters: each parameter once, with the copies it must match."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from t5train.checkpoint.consolidate.layouts.module_states import ModuleStates, Weight
from t5train.checkpoint.consolidate.layouts.optimizer_states import Master, ParameterGroup
from t5train.checkpoint.consolidate.plan import Plan, Source, TensorPlan
from t5train.errors import ConsolidationError, IncompleteCheckpoint, UnknownLayout

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


def _joined(found: Iterable[Mapping[str, Master]], module: ModuleStates) -> dict[str, Master]:
    """Merge the masters of all groups. If several stages hold one, the others are the first one's copies."""
    joined: dict[str, Master] = {}
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


def _require_named(module: ModuleStates, masters: Mapping[str, Master]) -> None:
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


def _stored_as(owner: str, module: ModuleStates) -> list[Weight]:
    """The weights that the module stores for a parameter: under its own name, then under its aliases."""
    names = [owner, *(alias for alias, name in module.aliases.items() if name == owner)]
    return [module.weights[name] for name in names if name in module.weights]


def _trained(name: str, master: Master, weights: Sequence[Weight]) -> TensorPlan:
    _require_shape(name, master.shape, weights)
    return TensorPlan(name, master.shape, "F32", master.source, (*_sources(weights), *master.copies))


def _untrained(name: str, weight: Weight, tied: Sequence[Weight], *, is_parameter: bool) -> TensorPlan:
    _require_shape(name, weight.shape, tied)
    dtype = "F32" if weight.source.dtype in _FLOATING else weight.source.dtype
    copies = tuple(copy for copy in _sources([weight, *tied]) if copy != weight.source)
    return TensorPlan(name, weight.shape, dtype, weight.source, copies, is_parameter)


def _require_shape(name: str, shape: tuple[int, ...], weights: Sequence[Weight]) -> None:
    for weight in weights:
        if weight.shape != shape:
            files = ", ".join(sorted({str(extent.file) for extent in weight.source.extents}))
            raise IncompleteCheckpoint(
                f"{files} belongs to another checkpoint: {name}, or a weight tied to {name}, has the shape "
                f"{weight.shape} there, but {shape} in the rest of the checkpoint. Choose another tag"
            )


def _sources(weights: Sequence[Weight]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(source for weight in weights for source in (weight.source, *weight.copies)))
