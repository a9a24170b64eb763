"""Where a live DeepSpeed engine keeps each parameter's fp32 master, for the sidecar, under Hugging Face's names.

DeepSpeed's names differ: it numbers experts per rank, Switch Transformers over all ranks; and it numbers the layers of
a pipeline from the first stage to the last.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from t5train.errors import UnknownLayout
from t5train.model.parameters import ExpertLayer, ParameterSlot, huggingface_name, name_of_factor
from t5train.model.t5 import T5

if TYPE_CHECKING:
    from t5train.model.pipeline.pipeline_model import T5Pipeline


def describe(
    engine: Any, model_prefix: str = "", pipeline_layers: Mapping[str, str] = MappingProxyType({})
) -> list[list[ParameterSlot]]:
    """Return the optimizer's parameter groups in order, each parameter with its offset in the group's flat buffer.

    ``model_prefix`` is the prefix of the engine's module before Hugging Face's names (``"module."`` for a wrapper),
    ``pipeline_layers`` the paths of a pipeline's layers in Hugging Face's model (see Sidecar).

    Order and offsets are those of DeepSpeed's partitioning, which differ from the optimizer's groups because of
    ``round_robin_gradients`` and alignment. At ZeRO 3 the groups are DeepSpeed's sub-groups, and offsets are those in
    each rank's own buffer. At ZeRO 0 in fp32, where the module's weights are the masters, the order is that of the
    optimizer's parameters. Raises UnknownLayout for an optimizer that keeps its masters in any other way.
    """
    names = {
        parameter: _huggingface_name(name, model_prefix, pipeline_layers)
        for parameter, name in engine.param_names.items()
    }
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_weights():
        return [_partitioned(group, names) for group in optimizer.fp16_groups]
    if hasattr(optimizer, "round_robin_bit16_groups"):
        return [
            _slots(group, names, offsets, shapes)
            for group, offsets, shapes in zip(
                optimizer.round_robin_bit16_groups,
                optimizer.round_robin_bit16_offsets,
                ([meta.shape for meta in group] for group in optimizer.round_robin_bit16_meta),
                strict=True,
            )
        ]
    for attribute in ("bf16_groups", "fp16_groups"):
        if hasattr(optimizer, attribute):
            return [_packed(group, names) for group in getattr(optimizer, attribute)]
    if isinstance(optimizer, torch.optim.Optimizer):
        return [_packed(group["params"], names) for group in optimizer.param_groups]
    raise UnknownLayout(
        f"{type(optimizer).__name__} keeps its fp32 masters in a way that this project does not support: "
        "use ZeRO 0 to 3 in fp32, bf16 or fp16"
    )


def _packed(group: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]) -> list[ParameterSlot]:
    offsets = list(accumulate((parameter.numel() for parameter in group), initial=0))[:-1]
    return _slots(group, names, offsets, [parameter.shape for parameter in group])


def _partitioned(group: Sequence[torch.nn.Parameter], names: Mapping[torch.nn.Parameter, str]) -> list[ParameterSlot]:
    """Return the slots at ZeRO 3, where each parameter has the same offset in every rank's own flat buffer."""
    parameters: list[Any] = list(group)  # with the attributes that ZeRO 3 adds to them
    offsets = list(accumulate((parameter.partition_numel() for parameter in parameters), initial=0))[:-1]
    return _slots(group, names, offsets, [parameter.ds_shape for parameter in parameters])


def _slots(
    group: Sequence[torch.nn.Parameter],
    names: Mapping[torch.nn.Parameter, str],
    offsets: Sequence[int],
    shapes: Sequence[torch.Size],
) -> list[ParameterSlot]:
    return [
        ParameterSlot.of(names[parameter], shape, offset)
        for parameter, offset, shape in zip(group, offsets, shapes, strict=True)
    ]


def _huggingface_name(name: str, model_prefix: str, pipeline_layers: Mapping[str, str]) -> str:
    try:
        return huggingface_name(name, model_prefix, pipeline_layers)
    except ValueError as error:
        raise UnknownLayout(f"parameter {error}") from None


_LOCAL_EXPERT = re.compile(r"(\.deepspeed_experts\.)(\d+)")


def expert_layers(model: "T5 | T5Pipeline") -> list[ExpertLayer]:
    """Return the model's layers with experts, which map their names to Hugging Face's."""
    return [
        ExpertLayer(path=path, module=path, num_experts=layer.num_experts, expert_parallel_size=layer.ep_size)
        for path, layer in model.sparse_layers()
    ]


def huggingface_names(model: "T5 | T5Pipeline", expert_rank: int) -> dict[str, str]:
    """Map every parameter's name to Hugging Face's. Experts are numbered over all expert-parallel ranks.

    The factors of an adapter, which Hugging Face's model lacks, are named after its weight (``name_of_factor``).
    """
    names = {
        name: name_of_factor(huggingface_name(name, "", model.pipeline_layers)) for name, _ in model.named_parameters()
    }
    for layer in expert_layers(model):
        first = expert_rank * (layer.num_experts // layer.expert_parallel_size)
        own = [name for name in names if name.startswith(f"{layer.module}.")]
        names |= {name: layer.huggingface_name(_renumbered(name, first)) for name in own}
    return names


def _renumbered(name: str, first: int) -> str:
    """Return the name with this rank's experts numbered from ``first``."""
    return _LOCAL_EXPERT.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)
