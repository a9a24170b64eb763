"""Train a toy pipeline on four ranks, in two stages or one. Save checkpoints, and what the live engines held.

    RANK=... WORLD_SIZE=4 python deepspeed_pipeline_checkpoints.py FOLDER [LAYOUT ...]

A name may have ``fp16`` in place of ``bf16``. For each layout (all, if none is named), this writes:

- ``FOLDER/theirs/{layout}/``: a DeepSpeed save folder.
- ``FOLDER/ours/{layout}/``: the same with sidecars.
- ``FOLDER/live/{layout}.{stage}.pt``, for each stage: masters, moments and buffers by DeepSpeed's own names.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
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

STEPS = 3
HUGGINGFACE = {
    "0": "shared", "tied_modules.embed": "shared", "1": "encoder.block.0", "2": "encoder.block.1",
    "4": "encoder.final_layer_norm",
}  # fmt: skip


class Embedding(nn.Embedding):
    """The embedding in the first layer, and the classifier in the last."""


class PositionalEmbedding(nn.Module):
    """An embedding with positions. The classifier does not use them, so its copy of them is never updated."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(rows, width)
        self.places = nn.Embedding(4, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.word(ids) + self.places.weight


class Block(nn.Module):
    """A layer with an odd number of elements, a frozen parameter and a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(9, size)
        self.outer = nn.Linear(size, 9, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.1, 1.3, 9), requires_grad=False)
        self.register_buffer("mean", torch.linspace(0.5, 0.7, 5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(torch.relu(self.inner(hidden))) * self.scale


def classify(embedding: Embedding | PositionalEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    words = embedding.word if isinstance(embedding, PositionalEmbedding) else embedding
    return hidden @ words.weight.T


def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def pipeline(num_stages: int, *, partly_tied: bool) -> PipelineModule:
    torch.manual_seed(7)
    embedding, tied = (PositionalEmbedding, ["word.weight"]) if partly_tied else (Embedding, ["weight"])
    return PipelineModule(
        [
            TiedLayerSpec("embed", embedding, 17, 9, tied_weight_attr=tied),
            LayerSpec(Block, 13),
            LayerSpec(Block, 7),
            lambda hidden: hidden * 2.0,
            LayerSpec(nn.LayerNorm, 9),
            TiedLayerSpec("embed", embedding, 17, 9, forward_fn=classify, tied_weight_attr=tied),
        ],
        num_stages=num_stages,
        loss_fn=loss,
        partition_method="uniform",
    )


BF16_SUMS, FP32_SUMS = ({"data_types": {"grad_accum_dtype": kind}} for kind in ("bf16", "fp32"))
LAYOUTS = {
    "zero1-bf16": configuration(1, "bf16") | BF16_SUMS,
    "zero1-bf16-fp32-accumulation": configuration(1, "bf16") | FP32_SUMS,
    "zero0-bf16": configuration(0, "bf16") | BF16_SUMS,
    "zero0-fp32": configuration(0, "fp32"),
    "zero1-fp32": configuration(1, "fp32"),
    "zero1-bf16-one-stage": configuration(1, "bf16") | BF16_SUMS,
    "zero1-bf16-partly-tied": configuration(1, "bf16") | BF16_SUMS,
    "zero1-bf16-node-local": configuration(1, "bf16") | BF16_SUMS | {"checkpoint": {"use_node_local_storage": True}},
}


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(100):
        ids = (torch.arange(8).reshape(2, 4) + 3 * step + rank) % 17
        yield ids, (ids + 1) % 17


def train(settings: dict[str, Any], name: str) -> Any:
    module = pipeline(1 if name.endswith("one-stage") else 2, partly_tied=name.endswith("partly-tied"))
    optimizer = torch.optim.AdamW(decay_groups(module), lr=0.05)
    settings = settings | {"gradient_accumulation_steps": 2}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    data = batches(engine.grid.get_data_parallel_rank())
    for _ in range(STEPS):
        engine.train_batch(data)
    return engine


def live(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """What this stage holds: masters of all parameters, moments of trained parameters, and buffers."""
    return {
        "masters": live_masters(engine, dict(engine.module.named_parameters())),
        "buffers": on_cpu(dict(engine.module.named_buffers())),
        **{key: live_moments(engine, key) for key in ("exp_avg", "exp_avg_sq")},
    }


def save_ours(engine: Any, folder: Path, name: str) -> None:
    tag, grid = folder / TAG, engine.grid
    engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    stage, data_rank, module = grid.get_stage_id(), grid.get_data_parallel_rank(), engine.module
    patterns = [f"*zero_pp_rank_{data_rank}_mp_rank_{stage:02d}_*.pt"]
    if data_rank == 0:
        patterns.append(f"mp_rank_{stage:02d}_*.pt")
        patterns += [f"layer_{layer:02d}-*.pt" for layer in range(module._local_start, module._local_stop)]
    position = {"data_parallel_rank": data_rank, "data_parallel_size": grid.get_data_parallel_world_size()}
    position |= {"pipeline_rank": stage, "pipeline_size": grid.get_pipe_parallel_world_size()}
    files = [file.name for pattern in patterns for file in tag.glob(pattern)]
    groups = describe(engine, pipeline_layers=HUGGINGFACE)
    fields = {"groups": groups, "pipeline_layers": HUGGINGFACE, "position": position}
    write_sidecar(engine, tag, name, files, samples=12, **fields)


def main(folder: Path, *layouts: str) -> None:
    join_ranks(folder)
    for name in layouts or LAYOUTS:
        settings = LAYOUTS[name.replace("fp16", "bf16")]
        engine = train(in_fp16(settings) if "fp16" in name else settings, name)
        engine.save_checkpoint(str(folder / "theirs" / name))
        torch.distributed.barrier()
        save_ours(engine, folder / "ours" / name, name)
        held = live(engine)
        if engine.grid.get_data_parallel_rank() == 0:
            (folder / "live").mkdir(exist_ok=True)
            torch.save(held, folder / "live" / f"{name}.{engine.grid.get_stage_id()}.pt")
        torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
