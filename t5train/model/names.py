"""What parameters are called in Hugging Face's models.

Experts and routers: DeepSpeed numbers them on each rank, Switch Transformers over all. Layers of a pipeline: DeepSpeed
numbers them from the first stage to the last.
"""

import re
from typing import TYPE_CHECKING

from t5train.model.t5 import T5
from t5train.sidecar import ExpertLayer, huggingface_name

if TYPE_CHECKING:
    from t5train.model.pipeline import T5Pipeline

_LOCAL_EXPERT = re.compile(r"(\.deepspeed_experts\.)(\d+)")


def expert_layers(model: "T5 | T5Pipeline") -> list[ExpertLayer]:
    """Where the model has experts, and how their names become Hugging Face's."""
    return [
        ExpertLayer(path=path, module=path, num_experts=layer.num_experts, expert_parallel_size=layer.ep_size)
        for path, layer in model.sparse_layers()
    ]


def huggingface_names(model: "T5 | T5Pipeline", expert_rank: int) -> dict[str, str]:
    """Hugging Face's name of every parameter by its own, experts numbered over all expert-parallel ranks."""
    names = {name: huggingface_name(name, "", model.pipeline_layers) for name, _ in model.named_parameters()}
    for layer in expert_layers(model):
        first = expert_rank * (layer.num_experts // layer.expert_parallel_size)
        own = [name for name in names if name.startswith(f"{layer.module}.")]
        names |= {name: layer.huggingface_name(_renumbered(name, first)) for name in own}
    return names


def _renumbered(name: str, first: int) -> str:
    """The name as it is where this rank's expert 0 is number ``first``."""
    return _LOCAL_EXPERT.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)
