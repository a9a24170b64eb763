"""The module in one file, ``mp_rank_00_model_states.pt``: every parameter and buffer in full."""

from collections.abc import Mapping
from typing import Any

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.module_states import (
    ModuleStates,
    Weight,
    buffer_names,
    model_states,
    step_of,
    stored_weights,
    tied_names,
)
from t5train.errors import UnknownLayout

MODEL_STATES = "mp_rank_00_model_states.pt"


def module_states(checkpoint: OpenedCheckpoint) -> ModuleStates:
    """The module of a checkpoint without experts, pipeline stages and partitioned parameters."""
    return states_of(checkpoint, whole_module(checkpoint))


def whole_module(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    """The model states, which hold a module."""
    model = model_states(checkpoint, MODEL_STATES)
    if not isinstance(model.get("module"), dict) or not model["module"]:
        raise UnknownLayout(f"{checkpoint.folder / MODEL_STATES} holds no module, as that of a pipeline or ZeRO 3")
    return model


def states_of(checkpoint: OpenedCheckpoint, model: Mapping[str, Any]) -> ModuleStates:
    """The states of a module that the model states hold in full."""
    stored = stored_weights(checkpoint, model["module"])
    return ModuleStates(
        weights={name: Weight.of(weight) for name, weight in stored.items()},
        buffers=buffer_names(checkpoint, model),
        aliases=tied_names(checkpoint, model, stored),
        step=step_of(checkpoint, model),
    )
