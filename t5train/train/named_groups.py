"""The engine's parameter groups by Hugging Face's names, for whoever saves or fills them."""

from typing import Any

from t5train.model.names import huggingface_names
from t5train.sidecar import ParameterSlot
from t5train.train.engine import model_of
from t5train.train.parameter_layout import describe
from t5train.train.ranks import expert_rank


def named_groups(engine: Any) -> list[list[ParameterSlot]]:
    """What ``describe`` tells; experts are this rank's, numbered over all ranks."""
    model = model_of(engine)
    names = huggingface_names(model, expert_rank(model.expert_parallel_size))
    return [[slot.model_copy(update={"name": names[slot.name]}) for slot in group] for group in describe(engine)]
