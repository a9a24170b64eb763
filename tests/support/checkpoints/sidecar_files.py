"""Checkpoints made of the files of ``deepspeed_files`` and sidecars, as our runs write them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.model.parameters import ExpertLayer, ParameterSlot
from t5train.records.digests import digest_files
from tests.support.checkpoints.deepspeed_files import (
    Layout,
    Model,
    Written,
    expected,
    expert_rank_and_position,
    make_model,
    paddings,
    sub_groups,
    write_files,
)

_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def write(folder: Path, layout: Layout, *, sidecars: bool) -> Written:
    """Write a checkpoint into the save folder ``folder``, with or without sidecars."""
    model, tag = make_model(layout), write_files(folder, layout)
    if not sidecars:
        return Written(tag, expected(layout, model))
    for rank in range(layout.ranks):
        files = [path.name for path in tag.glob("*.pt") if _writer(path.name) == rank]
        sidecar.write(tag, rank_sidecar(tag, layout, model, rank, files))
    tensors = expected(replace(layout, prefix=""), model)
    return Written(tag, {_published(layout, name): tensor for name, tensor in tensors.items()})


def rank_sidecar(tag: Path, layout: Layout, model: Model, rank: int, files: Sequence[str]) -> Sidecar:
    return Sidecar(
        run_fingerprint="a" * 64,
        step=layout.step,
        tag=tag.name,
        rank=rank,
        world_size=layout.ranks,
        layout=ParallelLayout(
            zero_stage=layout.stage,  # type: ignore[arg-type]  # pydantic checks it
            precision=_PRECISIONS[layout.precision],  # type: ignore[arg-type]  # pydantic checks it
            data_parallel_rank=rank,
            data_parallel_size=layout.ranks,
        ),
        files=digest_files(tag, files),
        groups=_slots(layout, model, rank),
        aliases=model.ties,
        expert_layers=_expert_layers(layout),
        huggingface_config={"model_type": "t5"},
        model_prefix=layout.prefix,
        data=DataState(samples_consumed=8 * layout.step, shards_fingerprint="b" * 64),
    )


def _writer(name: str) -> int:
    match = _RANK.search(name)
    return int(match[1]) if match else 0


def _expert_layers(layout: Layout) -> list[ExpertLayer]:
    return [
        ExpertLayer(path=f"block.{index}.mlp", module=f"moe.{index}", num_experts=count, expert_parallel_size=size)
        for index, (count, size) in enumerate(layout.experts)
    ]


def _published(layout: Layout, name: str) -> str:
    for layer in _expert_layers(layout):
        name = layer.huggingface_name(name)
    return name


def _slots(layout: Layout, model: Model, rank: int) -> list[list[ParameterSlot]]:
    """Offset of each parameter in its group with all partitions joined, or at ZeRO 3 in the rank's own buffer."""
    if layout.stage == 0 and layout.precision == torch.float32:
        return []
    if layout.stage == 3:
        return [_packed(layout, model, names, _shard_sizes(layout)) for names in sub_groups(layout, model)]
    names = [group.names[expert_rank_and_position(layout, group, rank)[0]] for group in model.groups]
    return [_packed(layout, model, group, _flat_sizes(layout)) for group in names]


_Sizes = Callable[[Sequence[tuple[int, ...]]], list[int]]


def _flat_sizes(layout: Layout) -> _Sizes:
    aligned = layout if layout.stage else replace(layout, alignment=1)
    return lambda shapes: [math.prod(shape) + gap for shape, gap in zip(shapes, paddings(aligned, shapes), strict=True)]


def _shard_sizes(layout: Layout) -> _Sizes:
    return lambda shapes: [-(-math.prod(shape) // layout.ranks) for shape in shapes]


def _packed(layout: Layout, model: Model, names: Sequence[str], sizes: _Sizes) -> list[ParameterSlot]:
    shapes = [tuple(model.masters[name].shape) for name in names]
    found, offset = [], 0
    for name, shape, size in zip(names, shapes, sizes(shapes), strict=True):
        found.append(ParameterSlot.of(_published(layout, name), shape, offset))
        offset += size
    return found
