"""The engine's fp32 masters, whole, through DeepSpeed's own interface: a second opinion to our consolidation."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups, safe_get_full_fp32_param
from torch import Tensor, nn

from t5train.errors import RanksDisagree, UnknownLayout
from t5train.model.names import huggingface_names
from t5train.train.engine import model_of
from t5train.train.ranks import gather_objects
from t5train.witness import digest_tensor


def full_masters(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 master on the CPU) of every parameter; a collective, to be run by all ranks.

    Raises RanksDisagree when two stages of a pipeline hold different copies of a tied parameter.
    """
    return _of_all_stages(engine) if engine.pipeline_parallelism else _of_whole_model(engine)


def _of_whole_model(engine: Any) -> Iterator[tuple[str, Tensor]]:
    copies, model = _whole_copies(engine), model_of(engine)
    names = [huggingface_names(model, expert_rank) for expert_rank in range(model.expert_parallel_size)]
    for name, parameter in model.named_parameters():
        whole = _whole_master(engine, name, parameter, copies)
        for expert_rank, held in enumerate(_of_expert_ranks(parameter, whole)):
            yield names[expert_rank][name], held.to("cpu", torch.float32)


def _of_all_stages(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """One stage after the other, each telling its masters to all ranks; of a tied parameter the first copy."""
    model, device = model_of(engine), get_accelerator().current_device_name()
    names = huggingface_names(model, expert_rank=0)
    own = {names[name]: (name, parameter) for name, parameter in model.named_parameters()}
    shapes = {name: list(parameter.shape) for name, (_, parameter) in own.items()}
    digests: dict[str, str] = {}
    for stage, held in enumerate(gather_objects(shapes)[:: engine.dp_world_size]):
        for name, shape in held.items():
            is_own = stage == engine.stage_id
            whole = _whole_master(engine, *own[name], {}) if is_own else torch.empty(shape)
            master = whole.to(device, torch.float32).contiguous()
            comm.broadcast(master, src=stage * engine.dp_world_size)
            is_first, digest = name not in digests, digest_tensor(master.cpu())
            if digests.setdefault(name, digest) != digest:
                raise RanksDisagree(f"stages of the pipeline hold different copies of {name}: please report this fault")
            if is_first:
                yield name, master.cpu()


def _whole_master(engine: Any, name: str, parameter: nn.Parameter, copies: Mapping[Tensor, Tensor]) -> Tensor:
    """fp32, in the parameter's own shape."""
    master = copies[parameter] if parameter in copies else safe_get_full_fp32_param(parameter)
    if master is None and parameter.dtype == torch.float32:
        master = parameter
    if master is None:
        raise UnknownLayout(f"DeepSpeed gives no fp32 master of {name} ({type(engine.optimizer).__name__})")
    return cast(Tensor, master.detach().reshape(getattr(parameter, "ds_shape", parameter.shape)))


def _of_expert_ranks(parameter: Any, master: Tensor) -> list[Tensor]:
    """A dense parameter's master alone; an expert's, and those that other ranks call by the same name."""
    if not is_moe_param(parameter):
        return [master]
    ranks = groups._get_expert_parallel_group(parameter.group_name)
    mine = master.to(get_accelerator().current_device_name()).contiguous()
    masters = [torch.empty_like(mine) for _ in range(comm.get_world_size(ranks))]
    comm.all_gather(masters, mine, group=ranks)
    return masters


def _whole_copies(engine: Any) -> dict[Tensor, Tensor]:
    """The fp32 copy of each parameter where the optimizer keeps one by parameter (bf16 at ZeRO 0)."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {weight: copy for weights, copies in pairs for weight, copy in zip(weights, copies, strict=True)}
