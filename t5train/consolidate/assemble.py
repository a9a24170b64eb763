"""Joins the masters of the optimizer with what only the module holds: frozen parameters, buffers, copies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.flat_groups import FlatGroup
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.plan import Plan, Source, TensorPlan
from t5train.errors import ConsolidationError, IncompleteCheckpoint, UnknownLayout

_FLOATING = frozenset({"F64", "F32", "BF16", "F16"})


def assemble(checkpoint: OpenedCheckpoint, model: Mapping[str, Any], groups: Sequence[FlatGroup]) -> Plan:
    """The plan of a dense checkpoint from its model states and the flat groups of its optimizer.

    A weight that is in no group is frozen, or the engine trains it in place; both are taken from the module.
    """
    module = module_weights(checkpoint, model)
    masters = _masters(groups)
    aliases = tied_names(checkpoint, model)
    buffers = _buffer_names(checkpoint, model)
    _require_named(module, masters, aliases)
    shapes = {slot.name: slot.shape for group in groups for slot in group.slots}
    tensors = [
        _trained(name, shapes[name], master, [module[name], *_aliases_of(name, aliases, module)])
        for name, master in masters.items()
    ]
    tensors += [
        _untrained(name, weight, _aliases_of(name, aliases, module), is_parameter=name not in buffers)
        for name, weight in module.items()
        if name not in masters and name not in aliases
    ]
    return Plan(tensors, aliases, _step(checkpoint, model))


def module_weights(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The module's state dictionary, by the names the result will have."""
    module = model.get("module")
    if not isinstance(module, dict) or not module:
        raise UnknownLayout(f"{checkpoint.folder}: the model states hold no module, as those of a pipeline or ZeRO 3")
    prefix = checkpoint.sidecars[0].model_prefix if checkpoint.sidecars else ""
    strangers = [name for name in module if not name.startswith(prefix)]
    if strangers:
        raise ConsolidationError(f"{checkpoint.folder}: {strangers[0]!r} does not begin with {prefix!r}")
    return {name.removeprefix(prefix): weight for name, weight in module.items() if isinstance(weight, StoredTensor)}


def tied_names(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> dict[str, str]:
    """Alias to owner: as recorded, and where two names of the module share their storage."""
    recorded = checkpoint.sidecars[0].aliases if checkpoint.sidecars else model.get("shared_params") or {}
    aliases = dict(recorded)
    owners: dict[tuple[Any, ...], str] = {}
    for name, weight in module_weights(checkpoint, model).items():
        place = (weight.offset, weight.dtype, weight.shape, weight.strides)
        if name not in aliases and weight.num_elements and owners.setdefault(place, name) != name:
            aliases[name] = owners[place]
    return {alias: _owner(alias, aliases) for alias in aliases}


def _owner(alias: str, aliases: Mapping[str, str]) -> str:
    name, seen = alias, {alias}
    while name in aliases:
        name = aliases[name]
        if name in seen:
            raise ConsolidationError(f"{alias} is recorded as an alias of itself")
        seen.add(name)
    return name


def _masters(groups: Sequence[FlatGroup]) -> dict[str, Source]:
    counts = Counter(slot.name for group in groups for slot in group.slots)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConsolidationError(f"{twice[0]} has a master in {counts[twice[0]]} places of the parameter groups")
    return {name: source for group in groups for name, source in group.masters().items()}


def _require_named(
    module: Mapping[str, StoredTensor], masters: Mapping[str, Source], aliases: Mapping[str, str]
) -> None:
    for name in masters:
        if name not in module:
            raise ConsolidationError(f"{name} has a master but no weight in the module's state dictionary")
        if name in aliases:
            raise ConsolidationError(f"{name} has a master of its own, yet is recorded as an alias of {aliases[name]}")
    for alias, owner in aliases.items():
        if owner not in module:
            raise ConsolidationError(f"{alias} is an alias of {owner}, which the module's state dictionary lacks")


def _aliases_of(owner: str, aliases: Mapping[str, str], module: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    return [module[alias] for alias in aliases if aliases[alias] == owner and alias in module]


def _trained(name: str, shape: tuple[int, ...], master: Source, weights: Sequence[StoredTensor]) -> TensorPlan:
    _require_shape(name, shape, weights)
    return TensorPlan(name, shape, "F32", master, _distinct(weights))


def _untrained(name: str, weight: StoredTensor, tied: Sequence[StoredTensor], *, is_parameter: bool) -> TensorPlan:
    _require_shape(name, weight.shape, tied)
    dtype = "F32" if weight.dtype in _FLOATING else weight.dtype
    source = weight.source()
    copies = tuple(copy for copy in _distinct(tied) if copy != source)
    return TensorPlan(name, weight.shape, dtype, source, copies, is_parameter)


def _require_shape(name: str, shape: tuple[int, ...], weights: Sequence[StoredTensor]) -> None:
    for weight in weights:
        if weight.shape != shape:
            raise IncompleteCheckpoint(
                f"{weight.file} holds {name} or its tie with the shape {weight.shape}, not {shape}: "
                "it is of another checkpoint"
            )


def _distinct(weights: Sequence[StoredTensor]) -> tuple[Source, ...]:
    return tuple(dict.fromkeys(weight.source() for weight in weights))


def _buffer_names(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> frozenset[str]:
    prefix = checkpoint.sidecars[0].model_prefix if checkpoint.sidecars else ""
    return frozenset(name.removeprefix(prefix) for name in model.get("buffer_names") or ())


def _step(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> int:
    """The optimizer step; the model states must be of the step that the sidecars name."""
    step = int(model.get("global_steps", 0))
    if checkpoint.sidecars and checkpoint.sidecars[0].step != step:
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: sidecars are of step {checkpoint.sidecars[0].step}, model states of step {step}"
        )
    return step
