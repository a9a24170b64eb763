"""The module's state, independent of the files that store it.

A dense module is stored in one file, ``mp_rank_00_model_states.pt``, with every parameter and buffer in full.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint
from t5train.checkpoint.consolidate.plan import Location
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.errors import ConsolidationError, IncompleteCheckpoint, UnknownLayout

_log = logging.getLogger(__name__)
_FOREIGN_KEYS = {"ds_autoep_layers": "AutoEP", "autoep_layers": "AutoEP", "folding": "AutoEP folded with AutoTP"}


@dataclass(frozen=True)
class ModuleStates:
    """The module's state dictionary, by the tensors' names in the result.

    ``aliases`` maps a tied name to the name that owns the weight. ``without_values`` names parameters of the module
    whose values only the optimizer has (ZeRO 3). ``in_several_stages`` names parameters that several pipeline stages
    use: each of these stages has a master of them, and these masters must be equal.
    """

    weights: Mapping[str, Location]
    buffers: frozenset[str]
    aliases: Mapping[str, str]
    step: int
    without_values: frozenset[str] = frozenset()
    in_several_stages: frozenset[str] = frozenset()


def model_states(checkpoint: OpenedCheckpoint, name: str) -> dict[str, Any]:
    """Read a file of model states. Raises UnknownLayout if its layout is not supported."""
    model = checkpoint.read(name)
    found = [what for key, what in _FOREIGN_KEYS.items() if model.get(key)]
    dimensions = model.get("checkpoint_parallel_dimensions") or {}
    if dimensions.get("tp_degree", 1) != 1:
        found.append(f"tensor parallelism over {dimensions['tp_degree']} ranks")
    if found:
        raise UnknownLayout(
            f"{checkpoint.folder / name} uses {' and '.join(found)}, which is not supported. Turn this feature of "
            "DeepSpeed off, and save the checkpoint again"
        )
    for key in ("global_steps", "dp_world_size"):
        if not isinstance(model.get(key, 0), int):
            raise UnknownLayout(
                f"{checkpoint.folder / name}: {key} is {model[key]!r}, not an integer. Probably the client_state "
                f"passed to save_checkpoint has a key {key}, which replaces DeepSpeed's. Choose a tag that was saved "
                "without that key"
            )
    return model


def stored_weights(checkpoint: OpenedCheckpoint, module: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a state dictionary, by their names in the result."""
    return {checkpoint.result_name(name): tensor for name, tensor in tensors_of(checkpoint, module).items()}


def tensors_of(checkpoint: OpenedCheckpoint, states: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a state dictionary. Other entries (modules' extra state) are left out and logged."""
    tensors = {name: item for name, item in states.items() if isinstance(item, StoredTensor)}
    if left_out := sorted(map(str, states.keys() - tensors.keys())):
        _log.warning(
            "%s: these entries are left out of the result, because they are not tensors: %s",
            checkpoint.folder,
            ", ".join(left_out),
        )
    return tensors


def buffer_names(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> frozenset[str]:
    """The names of the module's buffers in the result."""
    return frozenset(checkpoint.result_name(name) for name in model.get("buffer_names") or ())


def tied_names(
    checkpoint: OpenedCheckpoint, model: Mapping[str, Any], weights: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """The owner of each alias: recorded aliases, and names of the module that share their storage."""
    recorded = checkpoint.sidecars[0].aliases if checkpoint.sidecars else model.get("shared_params") or {}
    left_out = ties_left_out(checkpoint, model)
    aliases = {alias: owner for alias, owner in recorded.items() if alias not in left_out}
    owners: dict[tuple[Any, ...], str] = {}
    for name, weight in weights.items():
        place = (weight.file, weight.offset, weight.dtype, weight.shape, weight.strides)
        if name not in aliases and weight.num_elements and owners.setdefault(place, name) != name:
            aliases[name] = owners[place]
    return {alias: _owner(alias, aliases) for alias in aliases}


def ties_left_out(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> frozenset[str]:
    """Recorded aliases whose owner is absent: ``exclude_frozen_parameters`` removes only a frozen tie's first name."""
    if checkpoint.sidecars:
        return frozenset()
    ties = model.get("shared_params") or {}
    return frozenset(alias for alias, owner in ties.items() if owner not in model["module"])


def step_of(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> int:
    """The step of the model states. Raises IncompleteCheckpoint if the sidecars record another step."""
    step = int(model.get("global_steps", 0))
    if checkpoint.sidecars and checkpoint.sidecars[0].step != step:
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the sidecars record step {checkpoint.sidecars[0].step}, but the model states are "
            f"from step {step}; choose another tag"
        )
    return step


def _owner(alias: str, aliases: Mapping[str, str]) -> str:
    name, seen = alias, {alias}
    while name in aliases:
        name = aliases[name]
        if name in seen:
            raise ConsolidationError(
                f"the checkpoint records {alias} as tied to itself, so it is unknown which weight is stored. Choose "
                "another tag"
            )
        seen.add(name)
    return name


ReadModule = Callable[[OpenedCheckpoint], ModuleStates]
"""Reads the module's states: one half of a layout's rules."""


MODEL_STATES = "mp_rank_00_model_states.pt"


def module_states(checkpoint: OpenedCheckpoint) -> ModuleStates:
    """The module of a checkpoint without experts, pipeline stages or partitioned parameters."""
    return states_of(checkpoint, whole_module(checkpoint))


def whole_module(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    """The model states, after checking that they hold a module."""
    model = model_states(checkpoint, MODEL_STATES)
    if not isinstance(model.get("module"), dict) or not model["module"]:
        raise UnknownLayout(
            f"{checkpoint.folder / MODEL_STATES} holds no weights, and there are no other files that could hold them, "
            "as in a pipeline or at ZeRO 3. Choose another tag"
        )
    return model


def states_of(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> ModuleStates:
    """The module states, from model states that hold the module in full."""
    stored = stored_weights(checkpoint, model["module"])
    return ModuleStates(
        weights={name: Location(weight.shape, weight.source()) for name, weight in stored.items()},
        buffers=buffer_names(checkpoint, model),
        aliases=tied_names(checkpoint, model, stored),
        step=step_of(checkpoint, model),
    )
