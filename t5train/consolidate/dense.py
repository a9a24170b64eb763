"""The module in one file, ``mp_rank_00_model_states.pt``: every parameter and buffer in full."""

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
    model = model_states(checkpoint, MODEL_STATES)
    module = model.get("module")
    if not isinstance(module, dict) or not module:
        raise UnknownLayout(f"{checkpoint.folder / MODEL_STATES} holds no module, as that of a pipeline or ZeRO 3")
    stored = stored_weights(checkpoint, module)
    return ModuleStates(
        weights={name: Weight.of(weight) for name, weight in stored.items()},
        buffers=buffer_names(checkpoint, model),
        aliases=tied_names(checkpoint, model, stored),
        step=step_of(checkpoint, model),
    )
