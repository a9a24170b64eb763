"""The engine's fp32 masters, whole, through DeepSpeed's own interface: a second opinion to our consolidation."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from t5train.errors import UnknownLayout
from t5train.train.engine import model_of
from t5train.train.parameter_layout import describe


def full_masters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 master on the CPU) of every parameter; a collective, to be run by all ranks."""
    flat_groups = getattr(engine.optimizer, "fp32_groups_flat", None)
    if flat_groups is not None and not hasattr(engine.optimizer, "partition_size"):
        yield from _replicated(engine, flat_groups)
        return
    for name, parameter in model_of(engine).named_parameters():
        master = safe_get_full_fp32_param(parameter)
        if master is None and parameter.dtype == torch.float32:
            master = parameter.detach()
        if master is None:
            raise UnknownLayout(f"DeepSpeed gives no fp32 master of {name} ({type(engine.optimizer).__name__})")
        yield name, master.to("cpu", torch.float32).reshape(parameter.shape)


def _replicated(engine: Any, flat_groups: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    for flat, slots in zip(flat_groups, describe(engine), strict=True):
        for slot in slots:
            yield slot.name, flat.detach()[slot.offset : slot.offset + slot.numel].view(slot.shape).to("cpu")
