"""Train a toy model with experts on 2 or 4 ranks in every layout. Save checkpoints, and what the live engines held.

    RANK=... WORLD_SIZE=4 PYTHONHASHSEED=0 python deepspeed_moe_checkpoints.py FOLDER [LAYOUT ...]

A name may have ``fp16`` in place of ``bf16``. For each layout (all, if none is named), this writes:

- ``FOLDER/theirs/{layout}/``: a DeepSpeed save folder.
- ``FOLDER/ours/{layout}/``: the same with sidecars.
- ``FOLDER/live/{layout}/{rank}.pt``, from every rank: the masters, weights, buffers and moments that it held, with
  experts numbered globally.

DeepSpeed iterates over expert groups of different sizes in the order of a Python set. The fixed hash seed gives all
ranks the same order; otherwise they would deadlock.
"""

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import nn

from t5train.engine.parameter_layout import describe
from t5train.model.parameters import ExpertLayer, ParameterSlot
from tests.support.checkpoints.live_moments import live_masters, live_moments
from tests.support.checkpoints.toy_ranks import (
    TAG,
    configuration,
    decay_groups,
    in_fp16,
    join_ranks,
    on_cpu,
    write_sidecar,
)

STEPS, MOMENTS = 3, ("exp_avg", "exp_avg_sq")
_EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")


class Expert(nn.Module):
    """Two layers of odd sizes, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(6, 7)
        self.wo = nn.Linear(7, 6, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.wo(torch.relu(self.wi(hidden)) * self.scale)


@dataclass(frozen=True)
class Layout:
    """A DeepSpeed configuration, the expert-parallel size of each MoE layer, and how parameters are grouped.

    A ``plain`` module has neither ties nor frozen parameters.
    """

    stage: int
    precision: str
    expert_parallel_sizes: tuple[int, ...]
    num_experts: tuple[int, ...] = (4, 4)
    residual: bool = False
    max_group_size: int = 1 << 20
    decay_groups: bool = False
    plain: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


def layouts(world_size: int) -> dict[str, Layout]:
    data_first = {"use_data_before_expert_parallelism": True}
    bf16_sums, fp32_sums = ({"data_types": {"grad_accum_dtype": dtype}} for dtype in ("bf16", "fp32"))
    whole = world_size
    common = {
        "zero0-fp32": Layout(0, "fp32", (2, 2), settings={}),
        "zero0-bf16": Layout(0, "bf16", (whole, whole), settings=bf16_sums),
        "zero1-bf16": Layout(1, "bf16", (whole, whole), residual=True, settings=bf16_sums),
        "zero2-bf16-every-expert-everywhere": Layout(2, "bf16", (1, 1), decay_groups=True),
    }
    if world_size == 2:
        return common | {
            "zero0-bf16-plain": Layout(0, "bf16", (2, 2), max_group_size=120, plain=True, settings=bf16_sums),
            "zero1-fp32": Layout(1, "fp32", (2, 2), num_experts=(2, 6)),
        }
    offload = {"offload_optimizer": {"device": "cpu"}}
    return common | {
        "zero0-bf16-plain": Layout(0, "bf16", (2, 2), num_experts=(4, 2), plain=True, settings=bf16_sums),
        "zero0-bf16-ep2": Layout(0, "bf16", (2, 2), settings=bf16_sums),
        "zero1-bf16-fp32-accumulation": Layout(1, "bf16", (2, 2), max_group_size=60, settings=fp32_sums),
        "zero2-bf16-split": Layout(2, "bf16", (2, 2), max_group_size=60, decay_groups=True, residual=True),
        "zero2-bf16-aligned": Layout(2, "bf16", (2, 2), max_group_size=120, zero={"parameter_alignment": True}),
        "zero2-bf16-offload": Layout(2, "bf16", (2, 2), num_experts=(4, 8), zero=offload),
        "zero2-bf16-round-robin": Layout(2, "bf16", (2, 2), zero={"round_robin_gradients": True}),
        "zero1-fp32": Layout(1, "fp32", (2, 2), num_experts=(2, 6)),
        "zero1-bf16-mixed-sizes": Layout(1, "bf16", (4, 2), num_experts=(8, 4), settings=bf16_sums),
        "zero0-bf16-mixed-sizes": Layout(0, "bf16", (2, 4), num_experts=(2, 8), settings=bf16_sums),
        "zero2-bf16-data-before-experts": Layout(2, "bf16", (2, 2), settings=data_first),
        "zero0-bf16-data-before-experts": Layout(
            0, "bf16", (2, 4), settings=bf16_sums | data_first
        ),
    }  # fmt: skip


class Toy(nn.Module):
    """An embedding tied to the output, and two MoE layers with a norm between them."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.moe = nn.ModuleList(
            MoE(6, Expert(), num_experts=experts, ep_size=size, min_capacity=8, use_residual=layout.residual)
            for size, experts in zip(layout.expert_parallel_sizes, layout.num_experts, strict=True)
        )
        self.norm = nn.LayerNorm(6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.shared.weight
        if layout.plain:
            self.decoder.weight = nn.Parameter(0.5 * self.shared.weight.detach())
            for parameter in self.parameters():
                parameter.requires_grad_(True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, losses = self.shared(ids), 0.0
        for layer in self.moe:
            output, loss, _ = layer(hidden)
            hidden, losses = self.norm(hidden + output), losses + loss
        logits = self.decoder(hidden).float()
        return logits.logsumexp(-1).mean() - logits[..., 3].mean() + 0.01 * losses


def parameter_groups(model: Toy, layout: Layout) -> list[dict[str, Any]]:
    if layout.decay_groups:
        named = decay_groups(model, matrices={"name": "decayed"}, vectors={"name": "others"})
    else:
        named = [{"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}]
    return split_params_into_different_moe_groups_for_optimizer(named, max_group_size=layout.max_group_size)


def train(layout: Layout) -> Any:
    groups._EXPERT_PARALLEL_GROUP.clear()  # DeepSpeed keeps groups by name, ordered as in the first layout
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    torch.manual_seed(7 + torch.distributed.get_rank())  # experts differ between ranks; the rest is broadcast
    model = Toy(layout)
    optimizer = torch.optim.AdamW(parameter_groups(model, layout), lr=0.05)
    settings = configuration(layout.stage, "bf16" if layout.precision == "fp16" else layout.precision, **layout.zero)
    settings |= layout.settings
    settings = in_fp16(settings) if layout.precision == "fp16" else settings
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(STEPS):
        ids = torch.arange(8).reshape(2, 4) + 3 * step + 5 * engine.global_rank
        engine.backward(engine((ids % 11).to(engine.device)))
        engine.step()
    return engine


def global_name(engine: Any, name: str) -> str:
    """The name of this rank's parameter or buffer, with its expert numbered over all ranks."""
    match = _EXPERT.fullmatch(name)
    if not match:
        return name
    layer = engine.module.get_submodule(match[1])
    first = layer.num_local_experts * groups._get_expert_parallel_rank(layer.expert_group_name)
    return f"{match[1]}.deepspeed_moe.experts.deepspeed_experts.{first + int(match[2])}.{match[3]}"


def held(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    found = {
        "masters": live_masters(engine, weights),
        "weights": on_cpu(weights),
        "buffers": on_cpu(dict(engine.module.named_buffers())),
        **{key: live_moments(engine, key) for key in MOMENTS},
    }
    return {kind: {global_name(engine, name): each for name, each in of.items()} for kind, of in found.items()}


def save_ours(engine: Any, layout: Layout, folder: Path) -> None:
    tag, rank = folder / TAG, engine.global_rank
    engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    layers = [
        ExpertLayer(path=f"block.{index}.mlp", module=f"moe.{index}", num_experts=count, expert_parallel_size=size)
        for index, (count, size) in enumerate(zip(layout.num_experts, layout.expert_parallel_sizes, strict=True))
    ]
    files = [path.name for path in tag.glob("*.pt") if writer(path.name) == rank]
    fields = {
        "groups": [[published(engine, slot, layers) for slot in group] for group in describe(engine)],
        "aliases": {} if layout.plain else {"decoder.weight": "shared.weight"},
        "expert_layers": layers,
    }
    write_sidecar(engine, tag, f"zero{layout.stage}-{layout.precision}", files, samples=24, **fields)


def writer(name: str) -> int:
    """The rank that records a file; rank 0 for a file that several ranks write."""
    match = re.search(r"zero_pp_rank_(\d+)_", name)
    return int(match[1]) if match else 0


def published(engine: Any, slot: ParameterSlot, layers: list[ExpertLayer]) -> ParameterSlot:
    name = global_name(engine, slot.name)
    for layer in layers:
        name = layer.huggingface_name(name)
    return slot.model_copy(update={"name": name})


def main(folder: Path, *names: str) -> None:
    join_ranks(folder)
    known = layouts(torch.distributed.get_world_size())
    for name in names or known:
        layout = replace(known[name.replace("fp16", "bf16")], precision=name.split("-")[1])
        engine = train(layout)
        engine.save_checkpoint(str(folder / "theirs" / name))
        save_ours(engine, layout, folder / "ours" / name)
        (folder / "live" / name).mkdir(parents=True, exist_ok=True)
        torch.save(held(engine), folder / "live" / name / f"{engine.global_rank}.pt")
        torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
