"""The engine's fp32 masters, whole, through DeepSpeed's own interface: a second opinion to our consolidation."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from t5train.errors import UnknownLayout
from t5train.train.engine import model_of


def full_masters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 master on the CPU) of every parameter; a collective, to be run by all ranks."""
    copies = _whole_copies(engine)
    for name, parameter in model_of(engine).named_parameters():
        master = copies[parameter] if parameter in copies else safe_get_full_fp32_param(parameter)
        if master is None and parameter.dtype == torch.float32:
            master = parameter
        if master is None:
            raise UnknownLayout(f"DeepSpeed gives no fp32 master of {name} ({type(engine.optimizer).__name__})")
        yield name, master.detach().to("cpu", torch.float32).reshape(getattr(parameter, "ds_shape", parameter.shape))


def _whole_copies(engine: Any) -> dict[Tensor, Tensor]:
    """The fp32 copy of each parameter where the optimizer keeps one by parameter (bf16 at ZeRO 0)."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {weight: copy for weights, copies in pairs for weight, copy in zip(weights, copies, strict=True)}
