"""Functions shared by the programs of this folder that train toy models on real ranks, on CPUs or accelerators."""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator


def join_ranks(folder: Path) -> None:
    """Join the other ranks through a file in ``folder``. RANK and WORLD_SIZE must be in the environment."""
    accelerator, rank, world_size = get_accelerator(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if accelerator.device_name() != "cpu":
        accelerator.set_device(rank)
    backend = accelerator.communication_backend_name()
    torch.distributed.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    deepspeed.init_distributed(backend)


def in_fp16(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for bf16, changed to fp16."""
    kept = {key: value for key, value in settings.items() if key not in ("bf16", "data_types")}
    return kept | {"fp16": {"enabled": True, "initial_scale_power": 4}}


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU, so that tests without an accelerator can read them."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
