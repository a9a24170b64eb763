"""Train a toy model in several layouts. Save checkpoints, and what the live engines held. Every rank runs this.

    RANK=... WORLD_SIZE=... python deepspeed_checkpoints.py FOLDER [LAYOUT ...]

A name may have ``fp16`` in place of ``bf16``. For each layout (all, if none is named), this writes:

- ``FOLDER/theirs/{layout}/``: a DeepSpeed save folder.
- ``FOLDER/ours/{layout}/``: the same with sidecars.
- ``FOLDER/live/{layout}.pt``: what the engine held and, where zero_to_fp32 works, its result.
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from t5train.engine.parameter_layout import describe
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

ALIASES = {"decoder.weight": "shared.weight"}
STEPS = 3


class Toy(nn.Module):
    """Three layers with odd sizes, a tie, a frozen parameter and buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(17, 9)
        self.first = nn.Linear(9, 13)
        self.second = nn.Linear(13, 9)
        self.decoder = nn.Linear(9, 17, bias=False)
        self.decoder.weight = self.shared.weight
        self.scale = nn.Parameter(torch.linspace(0.1, 1.3, 9), requires_grad=False)
        self.register_buffer("mean", torch.linspace(0.5, 0.7, 5))
        self.register_buffer("positions", torch.arange(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.first(self.shared(ids)))) * self.scale
        return self.decoder(hidden).float().logsumexp(-1).mean() - self.decoder(hidden).float()[..., 3].mean()


class Untied(Toy):
    """A toy without the tie and the frozen parameter, which DeepSpeed's own tool cannot convert."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.weight = nn.Parameter(self.shared.weight.detach().clone() * 0.5)
        self.scale.requires_grad_(True)


def partitioned(precision: str, **zero: Any) -> dict[str, Any]:
    """ZeRO 3 with every parameter partitioned: none stays whole on every rank."""
    return configuration(3, precision, stage3_param_persistence_threshold=0, **zero)


CPU = {"device": "cpu"}
BF16_SUMS, FP32_SUMS = ({"data_types": {"grad_accum_dtype": kind}} for kind in ("bf16", "fp32"))
LAYOUTS: dict[str, tuple[type[Toy], dict[str, Any]]] = {
    "zero0-fp32": (Toy, configuration(0, "fp32")),
    "zero1-fp32": (Toy, configuration(1, "fp32")),
    "zero2-fp32": (Toy, configuration(2, "fp32")),
    "zero0-bf16": (Toy, configuration(0, "bf16") | BF16_SUMS),
    "zero1-bf16": (Toy, configuration(1, "bf16") | BF16_SUMS),
    "zero2-bf16": (Toy, configuration(2, "bf16")),
    "zero1-bf16-fp32-accumulation": (Toy, configuration(1, "bf16") | FP32_SUMS),
    "zero2-bf16-offload": (Toy, configuration(2, "bf16", offload_optimizer=CPU)),
    "zero2-bf16-round-robin": (Toy, configuration(2, "bf16", round_robin_gradients=True)),
    "zero3-fp32": (Toy, configuration(3, "fp32")),  # every parameter is small enough to stay whole on every rank
    "zero3-bf16": (Toy, partitioned("bf16", sub_group_size=60)),
    "zero3-bf16-offload": (Toy, partitioned("bf16", offload_optimizer=CPU, offload_param=CPU)),
    "zero3-bf16-untied": (Untied, partitioned("bf16", sub_group_size=60)),
    "zero1-bf16-untied": (Untied, configuration(1, "bf16") | BF16_SUMS),
    "zero2-bf16-untied": (Untied, configuration(2, "bf16")),
    "zero2-fp32-untied": (Untied, configuration(2, "fp32")),
}


def train(kind: type[Toy], settings: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = kind()
    optimizer = torch.optim.AdamW(decay_groups(model), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(STEPS):
        ids = torch.arange(8).reshape(2, 4) + 3 * step + engine.global_rank
        engine.backward(engine((ids % 17).to(engine.device)))
        engine.step()
    return engine


def live_weights(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that the engine computes with, gathered: at ZeRO 3 each rank holds a part."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def save_ours(engine: Any, folder: Path, name: str, tied: bool) -> None:
    tag, rank = folder / TAG, engine.global_rank
    engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    mine = [path.name for path in tag.glob(f"*zero_pp_rank_{rank}_*.pt")]
    mine += [path.name for path in tag.glob("mp_rank_*.pt")] if rank == 0 else []
    aliases = ALIASES if tied else {}
    write_sidecar(engine, tag, name, mine, samples=12, groups=describe(engine), aliases=aliases)


def main(folder: Path, *layouts: str) -> None:
    join_ranks(folder)
    for name in layouts or LAYOUTS:
        kind, settings = LAYOUTS[name.replace("fp16", "bf16")]
        engine = train(kind, in_fp16(settings) if "fp16" in name else settings)
        engine.save_checkpoint(str(folder / "theirs" / name))
        save_ours(engine, folder / "ours" / name, name, tied=kind is Toy)
        weights = live_weights(engine)
        live = {
            "masters": live_masters(engine, weights),
            "weights": on_cpu(weights),
            "buffers": on_cpu(dict(engine.module.named_buffers())),
            **{key: live_moments(engine, key) for key in ("exp_avg", "exp_avg_sq")},
        }
        if engine.global_rank == 0:
            save_live(live, folder, name, kind)
        torch.distributed.barrier()


def save_live(live: dict[str, Any], folder: Path, name: str, kind: type[Toy]) -> None:
    if kind is Untied:
        live["zero_to_fp32"] = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder / "theirs" / name)))
    (folder / "live").mkdir(exist_ok=True)
    torch.save(live, folder / "live" / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
