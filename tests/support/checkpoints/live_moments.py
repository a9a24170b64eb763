"""Masters and Adam's moments in a live DeepSpeed engine, assembled with the engine's own tables of offsets."""

from itertools import chain
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def live_moments(engine: Any, key: str) -> dict[str, torch.Tensor]:
    """One moment of every trained parameter, by name. All ranks must call this together."""
    optimizer = engine.optimizer
    trained = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    if isinstance(optimizer, torch.optim.Optimizer):
        found = {name: optimizer.state[p][key] for name, p in trained.items() if p in optimizer.state}
    elif hasattr(optimizer, "fp32_groups"):
        pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        found = {engine.param_names[parameter]: optimizer.optimizer.state[master][key] for parameter, master in pairs}
    elif engine.zero_optimization_partition_weights():
        found = {name: safe_get_full_optimizer_state(parameter, key) for name, parameter in trained.items()}
    else:
        found = _gathered(engine, key)
    return {name: moment.detach().float().cpu().clone() for name, moment in found.items()}


def live_masters(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters by name, from DeepSpeed's API, or else from its wrappers; of frozen parameters, their weights."""
    masters = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        masters[name] = (weights[name] if master is None else master).detach().float().cpu().clone()
    if hasattr(engine.optimizer, "fp32_groups"):
        lows, highs = engine.optimizer.fp16_groups, engine.optimizer.fp32_groups
        for low, high in zip(chain(*lows), chain(*highs), strict=True):
            masters[engine.param_names[low]] = high.detach().cpu().clone()
    return masters


def _gathered(engine: Any, key: str) -> dict[str, torch.Tensor]:
    """Moments from the flat buffers of ZeRO 1, 2 and BF16_Optimizer (safe_get_full_optimizer_state finds none)."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "round_robin_bit16_groups"):
        groups, offsets = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
        flats = optimizer.single_partition_of_fp32_groups
    else:
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        offsets = [[sum(p.numel() for p in held[:index]) for index in range(len(held))] for held in groups]
    found = {}
    for held, starts, flat, ranks in zip(groups, offsets, flats, optimizer.real_dp_process_group, strict=True):
        moment = optimizer.optimizer.state[flat][key].to(get_accelerator().current_device_name())
        parts = [torch.zeros_like(moment) for _ in range(torch.distributed.get_world_size(ranks))]
        torch.distributed.all_gather(parts, moment, ranks)
        whole = torch.cat(parts)
        for parameter, start in zip(held, starts, strict=True):
            found[engine.param_names[parameter]] = whole[start : start + parameter.numel()].reshape(parameter.shape)
    return found
