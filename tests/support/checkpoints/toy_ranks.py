"""Functions shared by the programs of this folder that train toy models on real ranks, on CPUs or accelerators."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.records.digests import digest_files

TAG = "step-00000003"


def join_ranks(folder: Path) -> None:
    """Join the other ranks through a file in ``folder``. RANK and WORLD_SIZE must be in the environment."""
    accelerator, rank, world_size = get_accelerator(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if accelerator.device_name() != "cpu":
        accelerator.set_device(rank)
    backend = accelerator.communication_backend_name()
    torch.distributed.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    deepspeed.init_distributed(backend)


def configuration(stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return settings | ({"bf16": {"enabled": True}} if precision == "bf16" else {})


def decay_groups(model: torch.nn.Module, **named: dict[str, str]) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which are decayed, and vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, **named.get("matrices", {})},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0, **named.get("vectors", {})},
    ]


def write_sidecar(engine: Any, tag: Path, layout: str, files: Iterable[str], *, samples: int, **fields: Any) -> None:
    """Write the sidecar of this rank for the files that it wrote, with its further ``fields`` and ``position``."""
    stage, precision = layout.removeprefix("zero").split("-")[:2]
    position = {"data_parallel_rank": engine.global_rank, "data_parallel_size": engine.world_size}
    position |= fields.pop("position", {})
    sidecar.write(
        tag,
        Sidecar(
            run_fingerprint="f" * 64,
            step=engine.global_steps,
            tag=tag.name,
            rank=engine.global_rank,
            world_size=engine.world_size,
            layout=ParallelLayout.model_validate({"zero_stage": int(stage), "precision": precision, **position}),
            files=digest_files(tag, files),
            huggingface_config={"model_type": "toy"},
            data=DataState(samples_consumed=samples, shards_fingerprint="s"),
            **fields,
        ),
    )


def in_fp16(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in ("bf16", "data_types")}
    return kept | {"fp16": {"enabled": True, "initial_scale_power": 4}}


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU, so that tests without an accelerator can read them."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
