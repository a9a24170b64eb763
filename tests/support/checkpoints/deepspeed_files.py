"""Checkpoint files as DeepSpeed 0.19 writes them, written without DeepSpeed.

| stage | file | written by | holds |
|---|---|---|---|
| 0, 1, 2 | ``mp_rank_00_model_states.pt`` | rank 0 | module; shapes in the order of the flat groups |
| 1, 2 | ``zero_pp_rank_R_mp_rank_00_optim_states.pt`` | each rank | its partition of every flat group |
| 3 | ``zero_pp_rank_R_mp_rank_00_model_states.pt`` | each rank | empty parameters, buffers, frozen fragments |
| 3 | ``zero_pp_rank_R_mp_rank_00_optim_states.pt`` | each rank | its slice of every parameter |
| 0, 1, 2 | ``layer_L_expert_E_mp_rank_00_model_states.pt`` | first rank with expert E | expert E of MoE layer L |
| 0 | ``expp_rank_E_mp_rank_00_optim_states.pt`` | first rank with its experts | its optimizer, as in model states |

In bf16, the names of ZeRO's optimizer files begin with ``bf16_``. A flat group is its parameters end to end, aligned if
the configuration says so, and padded to a multiple of twice the number of ranks that it is partitioned over. The files
omit the padding at the end, except those of BF16_Optimizer. At ZeRO 3, each parameter is padded to a multiple of the
number of ranks and partitioned by itself.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
EXPERTS = "deepspeed_moe.experts.deepspeed_experts"


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk, and the tensors that consolidation must yield."""

    tag: Path
    expected: dict[str, torch.Tensor]

    @property
    def folder(self) -> Path:
        return self.tag.parent


@dataclass(frozen=True)
class Layout:
    """Shapes of each dense parameter group, and how everything is spread over files.

    ``experts`` holds the number of experts and the expert-parallel size of each MoE layer, and ``expert_shapes`` the
    shapes of one expert's weights. A parameter group of experts has at most ``group_elements`` elements, and so has a
    sub-group at ZeRO 3.
    """

    groups: Sequence[Sequence[Shape]]
    stage: int = 2
    ranks: int = 2
    precision: torch.dtype = torch.bfloat16
    alignment: int = 1
    keep_padding: bool = False
    experts: Sequence[tuple[int, int]] = ()
    expert_shapes: Sequence[Shape] = ((3, 2), (3,))
    group_elements: int = 1 << 20
    consecutive: bool = False
    flat: bool = True
    frozen: Sequence[Shape] = ()
    ties: int = 0
    buffers: int = 0
    prefix: str = ""
    seed: int = 0
    step: int = 7


@dataclass(frozen=True)
class Group:
    """A parameter group: the names in it, by expert-parallel rank. A dense group is the same on all ranks."""

    names: Sequence[Sequence[str]]

    @property
    def expert_parallel_size(self) -> int:
        return len(self.names)

    @property
    def of_experts(self) -> bool:
        return EXPERTS in self.names[0][0]


@dataclass
class Model:
    """What the engine held: fp32 masters, and the module's frozen parameters, buffers and ties."""

    masters: dict[str, torch.Tensor]
    groups: list[Group]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    ties: dict[str, str]


def write_files(folder: Path, layout: Layout) -> Path:
    """Write the files of every rank into a new tag, and return its folder."""
    tag = folder / f"global_step{layout.step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    model = make_model(layout)
    files = {0: _zero0, 1: zero12_files, 2: zero12_files, 3: _zero3}[layout.stage](layout, model)
    for name, content in files.items():
        torch.save(content, tag / name)
    return tag


def make_model(layout: Layout) -> Model:
    """Make random values for everything that the layout describes."""
    generator = torch.Generator().manual_seed(layout.seed)
    shapes = {f"layer{g}.weight{i}": s for g, group in enumerate(layout.groups) for i, s in enumerate(group)}
    groups = [
        Group([[f"layer{g}.weight{i}" for i in range(len(group))]]) for g, group in enumerate(layout.groups)
    ] + _expert_groups(layout)
    for index, (count, _) in enumerate(layout.experts):
        shapes |= {f"moe.{index}.{EXPERTS}.{e}.{t}": s for e in range(count) for t, s in _expert(layout).items()}
    frozen = {f"frozen{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(layout.frozen)}
    return Model(
        masters={name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        groups=groups,
        frozen={name: tensor.to(layout.precision) for name, tensor in frozen.items()},
        buffers={f"buffer{index}": torch.arange(3 + index) for index in range(layout.buffers)},
        ties=dict(zip((f"tie{index}" for index in range(layout.ties)), groups[0].names[0], strict=False)),
    )


def expected(layout: Layout, model: Model) -> dict[str, torch.Tensor]:
    """The expected result of consolidation, by the names that the files use."""
    tensors = model.masters | {name: tensor.float() for name, tensor in model.frozen.items()} | model.buffers
    return {layout.prefix + name: tensor for name, tensor in tensors.items()}


# Parameter groups


def _expert(layout: Layout) -> dict[str, Shape]:
    return {f"w{index}": shape for index, shape in enumerate(layout.expert_shapes)}


def _expert_groups(layout: Layout) -> list[Group]:
    """One group for each expert-parallel size, cut where it would exceed ``group_elements``."""
    groups = []
    for size in sorted({size for _, size in layout.experts}):
        names = [_names_of_rank(layout, size, rank) for rank in range(size)]
        sizes = [math.prod(_expert(layout)[name.rsplit(".", 1)[1]]) for name in names[0]]
        groups += [Group([part[first:end] for part in names]) for first, end in _cuts(sizes, layout.group_elements)]
    return groups


def _names_of_rank(layout: Layout, size: int, rank: int) -> list[str]:
    """Weights of expert-parallel rank ``rank``. Each rank has the same number of consecutive experts of every layer."""
    return [
        f"moe.{index}.{EXPERTS}.{rank * (count // size) + local}.{tensor}"
        for index, (count, layer_size) in enumerate(layout.experts)
        if layer_size == size
        for local in range(count // size)
        for tensor in _expert(layout)
    ]


def _cuts(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    cuts, first = [], 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sum(sizes[first : end + 1]) > most:
            cuts.append((first, end))
            first = end
    return cuts


def holders(layout: Layout, size: int) -> list[list[int]]:
    """For each expert-parallel rank, the ranks that hold its experts."""
    each = layout.ranks // size
    if layout.consecutive:
        return [list(range(first, first + each)) for first in range(0, layout.ranks, each)]
    return [list(range(first, layout.ranks, size)) for first in range(size)]


def expert_rank_and_position(layout: Layout, group: Group, rank: int) -> tuple[int, int]:
    """The expert-parallel rank of data-parallel rank ``rank``, and its position among ranks with the same experts."""
    return next(
        (e, held.index(rank)) for e, held in enumerate(holders(layout, group.expert_parallel_size)) if rank in held
    )


# Flat buffers


def paddings(layout: Layout, shapes: Sequence[Shape]) -> list[int]:
    """Padding after each parameter, so that the next begins at a multiple of ``alignment``; 0 after the last."""
    found, offset = [], 0
    for index, shape in enumerate(shapes):
        offset += math.prod(shape)
        found.append(0 if index == len(shapes) - 1 else -offset % layout.alignment)
        offset += found[-1]
    return found


def partition(layout: Layout, model: Model, group: Group, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's partition of a flat group: as the file stores masters, and with the padding that moments keep."""
    expert_rank, position = expert_rank_and_position(layout, group, rank)
    tensors = [model.masters[name] for name in group.names[expert_rank]]
    gaps = paddings(layout, [tuple(tensor.shape) for tensor in tensors])
    flat = torch.cat(
        [piece for t, gap in zip(tensors, gaps, strict=True) for piece in (t.reshape(-1), torch.zeros(gap))]
    )
    ranks = layout.ranks // group.expert_parallel_size
    whole = torch.cat([flat, torch.zeros(-flat.numel() % (2 * ranks))])
    part = whole.numel() // ranks
    padded = whole[position * part : (position + 1) * part].clone()
    return (padded if layout.keep_padding else padded[: max(0, flat.numel() - position * part)].clone()), padded


def shard(tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """A rank's slice of a parameter at ZeRO 3. Padding after the last element is arbitrary."""
    part = -(-tensor.numel() // ranks)
    whole = torch.cat([tensor.reshape(-1), torch.full((part * ranks - tensor.numel(),), 9.0, dtype=tensor.dtype)])
    return whole[rank * part : (rank + 1) * part].clone()


def _adam(layout: Layout, tensors: Iterable[torch.Tensor], names: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of torch's Adam: first moments are half the masters, second ones a quarter."""
    states = {
        index: {"step": torch.tensor(float(layout.step)), "exp_avg": tensor * 0.5, "exp_avg_sq": tensor * 0.25}
        for index, tensor in enumerate(tensors)
    }
    groups = [{"lr": 0.1, "params": [index], **name} for index, name in enumerate(names)]
    return {"state": states, "param_groups": groups}


def _named(model: Model) -> list[dict[str, Any]]:
    """Keys that DeepSpeed adds to the optimizer's parameter groups of experts."""
    return [
        {"name": f"ep_size_{group.expert_parallel_size}", "moe": True} if group.of_experts else {}
        for group in model.groups
    ]


# Files


def _model_states(layout: Layout, model: Model, module: dict[str, torch.Tensor], shapes: Any) -> dict[str, Any]:
    """The content that all files of model states have in common."""
    prefix = layout.prefix
    return {
        "module": {prefix + name: tensor for name, tensor in module.items()},
        "buffer_names": [prefix + name for name in model.buffers],
        "param_shapes": shapes,
        "shared_params": {prefix + alias: prefix + owner for alias, owner in model.ties.items()},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "optimizer": None,
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "global_steps": layout.step,
        "global_samples": 8 * layout.step,
        "skipped_steps": 0,
        "ds_config": {"use_data_before_expert_parallelism": layout.consecutive},
        "ds_version": "0.19.8",
    }


def _shapes(layout: Layout, model: Model) -> list[OrderedDict[str, torch.Size]]:
    """Names and shapes of each group in the order of its flat buffer, with experts numbered as on rank 0."""
    return [
        OrderedDict((layout.prefix + name, model.masters[name].shape) for name in group.names[0])
        for group in model.groups
    ]


def _weights(layout: Layout, model: Model) -> dict[str, torch.Tensor]:
    """The module's state dictionary without experts; a tied weight is one tensor under two names."""
    dense = {n: t.to(layout.precision) for n, t in model.masters.items() if EXPERTS not in n}
    return dense | model.frozen | model.buffers | {alias: dense[owner] for alias, owner in model.ties.items()}


def _expert_files(layout: Layout, model: Model) -> dict[str, Any]:
    return {
        f"layer_{index}_expert_{expert}_mp_rank_00_model_states.pt": {
            f"{layout.prefix}{name}": model.masters[name].to(layout.precision)
            for tensor in _expert(layout)
            for name in [f"moe.{index}.{EXPERTS}.{expert}.{tensor}"]
        }
        for index, (count, _) in enumerate(layout.experts)
        for expert in range(count)
    }


def _with_experts(layout: Layout, states: dict[str, Any]) -> dict[str, Any]:
    return states | {"num_experts": [count for count, _ in layout.experts]} if layout.experts else states


def _zero_file(layout: Layout, rank: int, state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    prefix = "bf16_" if layout.precision == torch.bfloat16 else ""
    content = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", content


def zero12_files(layout: Layout, model: Model) -> dict[str, Any]:
    states = _model_states(layout, model, _weights(layout, model), _shapes(layout, model))
    files = {"mp_rank_00_model_states.pt": _with_experts(layout, states), **_expert_files(layout, model)}
    for rank in range(layout.ranks):
        parts = [partition(layout, model, group, rank) for group in model.groups]
        state = {
            "single_partition_of_fp32_groups": [stored for stored, _ in parts],
            "partition_count": [layout.ranks // group.expert_parallel_size for group in model.groups],
            "base_optimizer_state": _adam(layout, [padded for _, padded in parts], _named(model)),
            "zero_stage": layout.stage,
        }
        if not layout.keep_padding:
            shapes = _shapes(layout, model)
            state["param_alignment_paddings"] = [paddings(layout, [tuple(s) for s in g.values()]) for g in shapes]
        name, content = _zero_file(layout, rank, state)
        files[name] = content
    return files


def _zero0(layout: Layout, model: Model) -> dict[str, Any]:
    states = _model_states(layout, model, _weights(layout, model), None) | {"shared_params": None}
    largest = max((size for _, size in layout.experts), default=1)
    optimizers = [_replicated(layout, model, held[0]) for held in holders(layout, largest)]
    files = {"mp_rank_00_model_states.pt": _with_experts(layout, states | {"optimizer": optimizers[0]})}
    if layout.experts:
        files |= _expert_files(layout, model)
        files |= {f"expp_rank_{e}_mp_rank_00_optim_states.pt": {"optimizer": o} for e, o in enumerate(optimizers)}
    return files


def _replicated(layout: Layout, model: Model, rank: int) -> dict[str, Any]:
    """A rank's optimizer state at ZeRO 0. In low precision, DeepSpeed wraps torch's state and adds the masters."""
    held = [
        [model.masters[name] for name in group.names[expert_rank_and_position(layout, group, rank)[0]]]
        for group in model.groups
    ]
    flat = [torch.cat([tensor.reshape(-1) for tensor in group]) for group in held]
    adam = _adam(layout, flat, _named(model))
    if layout.precision == torch.float32:
        return adam
    masters = {"fp32_groups_flat": flat} if layout.flat else {"fp32_groups": held}
    return {"optimizer_state_dict": adam, "clip_grad": 0.0, **masters}


def _zero3(layout: Layout, model: Model) -> dict[str, Any]:
    names = sub_groups(layout, model)
    shapes = [OrderedDict((layout.prefix + n, model.masters[n].shape) for n in group) for group in names]
    empty = {name: torch.empty(0, dtype=layout.precision) for name in [*model.masters, *model.frozen, *model.ties]}
    files: dict[str, Any] = {}
    for rank in range(layout.ranks):
        flat = [torch.cat([shard(model.masters[n], layout.ranks, rank) for n in group]) for group in names]
        frozen = {layout.prefix + n: shard(t, layout.ranks, rank) for n, t in model.frozen.items()}
        states = _model_states(layout, model, empty | model.buffers, shapes) | {
            "frozen_param_shapes": OrderedDict((layout.prefix + n, t.shape) for n, t in model.frozen.items()),
            "frozen_param_fragments": OrderedDict(frozen),
        }
        if rank:
            states["shared_params"] = {}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = states
        state = {
            "fp32_flat_groups": flat,
            "optimizer_state_dict": _adam(layout, flat, [{} for _ in flat]),
            "partition_count": layout.ranks,
            "zero_stage": 3,
        }
        name, content = _zero_file(layout, rank, state)
        files[name] = content
    return files


def sub_groups(layout: Layout, model: Model) -> list[list[str]]:
    """The parameters of each ZeRO 3 sub-group. No sub-group spans two parameter groups."""
    found = []
    for names in (group.names[0] for group in model.groups):
        sizes = [model.masters[name].numel() for name in names]
        found += [list(names[first:end]) for first, end in _cuts(sizes, layout.group_elements)]
    return found
