"""Writes bf16 checkpoints of any size, in the layout of DeepSpeed 0.19 on four ranks, with bounded memory.

All values are random and differ, so that a misplaced value is noticed. Tensors are filled in unnamed files, which the
kernel writes to disk when memory is short, and saved by ``torch.save``, as DeepSpeed does.
"""

import math
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

RANKS, TAG = 4, "global_step1"
_EXPERTS, _EXPERT_PARALLEL = 8, 2
_MODEL = {"buffer_names": [], "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None}
_MODEL |= {"dp_world_size": RANKS, "global_steps": 1, "ds_version": "0.19.8", "optimizer": None}
Shapes = OrderedDict[str, tuple[int, ...]]


class Scratch:
    """Makes tensors in unnamed files, which disappear when they are no longer used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor in a new file."""
        with tempfile.NamedTemporaryFile(dir=self._folder) as file:
            size = max(math.prod(shape), 1)
            file.truncate(size * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype)[: math.prod(shape)].view(*shape)


class FlatGroup:
    """A parameter group's masters, concatenated and partitioned over ranks.

    The size is rounded up to a multiple of twice the number of ranks; the last partition omits the padding.
    """

    def __init__(self, scratch: Scratch, total: int, ranks: int) -> None:
        size = -(-total // (2 * ranks)) * 2
        self.partitions = [scratch.tensor((min(size, total - rank * size),), torch.float32) for rank in range(ranks)]
        self._size, self._filled = size, 0

    def append(self, values: torch.Tensor) -> None:
        """Append a parameter's master."""
        flat = values.view(-1)
        while len(flat):
            rank, offset = divmod(self._filled, self._size)
            target = self.partitions[rank][offset : offset + len(flat)]
            target.copy_(flat[: len(target)])
            flat, self._filled = flat[len(target) :], self._filled + len(target)


@dataclass(frozen=True)
class SavedGroup:
    """What a rank saves of a parameter group: its partition, and the number of ranks and of parameters of the group.

    ``mark`` has fields that are added to the group in the optimizer's state.
    """

    master: torch.Tensor
    ranks: int
    parameters: int
    mark: dict[str, Any]


def dense_shapes(parameters: int) -> Shapes:
    """Return the shapes of a dense model: an embedding and feed-forward layers, with about this many parameters."""
    layer = {"wi_0.weight": (2816, 1024), "wi_1.weight": (2816, 1024), "wo.weight": (1024, 2816), "norm": (1024,)}
    return _shapes(parameters, layer)


def expert_shapes(parameters: int) -> Shapes:
    """Return the shapes of a model whose layers are a gate and experts, with about this many parameters."""
    moe, layer = "moe.deepspeed_moe", dict[str, tuple[int, ...]]()
    layer |= {"norm": (1024,), f"{moe}.gate.wg.weight": (_EXPERTS, 1024)}
    for expert in range(_EXPERTS):
        layer[f"{moe}.experts.deepspeed_experts.{expert}.wi.weight"] = (2816, 1024)
        layer[f"{moe}.experts.deepspeed_experts.{expert}.wo.weight"] = (1024, 2816)
    return _shapes(parameters, layer)


def _shapes(parameters: int, layer: Mapping[str, tuple[int, ...]]) -> Shapes:
    found: Shapes = OrderedDict({"shared.weight": (32128, 1024)})
    each = sum(math.prod(shape) for shape in layer.values())
    for block in range(max(1, round((parameters - 32128 * 1024) / each))):
        found |= {f"block.{block}.{name}": shape for name, shape in layer.items()}
    return found


def write_zero2(folder: Path, parameters: int, *, moments: bool = True) -> int:
    """Write a ZeRO 2 checkpoint. Returns the number of its parameters."""
    tag, scratch, shapes = _new(folder), Scratch(folder), dense_shapes(parameters)
    group = FlatGroup(scratch, _total(shapes), RANKS)
    module = {name: _placed(scratch, values, group.append) for name, values in _masters(shapes)}
    torch.save(_MODEL | {"module": module, "param_shapes": [_sizes(shapes)]}, tag / "mp_rank_00_model_states.pt")
    for rank, master in enumerate(group.partitions):
        _save_zero2(tag, rank, [SavedGroup(master, RANKS, len(shapes), {})], scratch, moments=moments)
    return _total(shapes)


def write_zero3(folder: Path, parameters: int) -> int:
    """Write a ZeRO 3 checkpoint, with every parameter partitioned over the ranks. Returns the number of parameters."""
    tag, scratch, shapes = _new(folder), Scratch(folder), dense_shapes(parameters)
    parts = [-(-math.prod(shape) // RANKS) for shape in shapes.values()]
    flats = [scratch.tensor((sum(parts),), torch.float32) for _ in range(RANKS)]
    for (_, values), part, start in zip(_masters(shapes), parts, accumulate(parts, initial=0), strict=False):
        for rank, piece in enumerate(values.view(-1).split(part)):
            flats[rank][start : start + len(piece)].copy_(piece)
    module = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
    for rank, flat in enumerate(flats):
        inner = {"state": {0: _moments(scratch, flat)}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        state = {"zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [flat], "optimizer_state_dict": inner}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, tag / f"bf16_{name}_optim_states.pt")
        model = _MODEL | {"module": module, "param_shapes": [_sizes(shapes)]}
        torch.save(model, tag / f"{name}_model_states.pt")
    return _total(shapes)


def write_experts(folder: Path, parameters: int) -> int:
    """Write a ZeRO 2 checkpoint of a mixture of experts, expert parallelism 2. Returns the number of its parameters."""
    tag, scratch, shapes = _new(folder), Scratch(folder), expert_shapes(parameters)
    experts = OrderedDict((name, shape) for name, shape in shapes.items() if _expert(name) is not None)
    dense = OrderedDict((name, shape) for name, shape in shapes.items() if name not in experts)
    local = OrderedDict((name, shape) for name, shape in experts.items() if _expert_rank(name) == 0)
    group = FlatGroup(scratch, _total(dense), RANKS)
    held = [FlatGroup(scratch, _total(local), RANKS // _EXPERT_PARALLEL) for _ in range(_EXPERT_PARALLEL)]
    module, layers = dict[str, torch.Tensor](), dict[str, int]()
    files: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, values in _masters(shapes):
        expert = _expert(name)
        if expert is None:
            module[name] = _placed(scratch, values, group.append)
        else:
            layer = layers.setdefault(name.partition(".deepspeed_moe")[0], len(layers))
            weight = _placed(scratch, values, held[_expert_rank(name)].append)
            files.setdefault((layer, expert), {})[name] = weight
    model = _MODEL | {"module": module, "param_shapes": [_sizes(dense), _sizes(local)], "ds_config": {}}
    torch.save(model | {"num_experts": [_EXPERTS] * len(layers)}, tag / "mp_rank_00_model_states.pt")
    for (layer, expert), content in files.items():
        torch.save(content, tag / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
    each, mark = RANKS // _EXPERT_PARALLEL, {"name": f"ep_size_{_EXPERT_PARALLEL}", "moe": True}
    for rank in range(RANKS):
        own = held[rank % _EXPERT_PARALLEL].partitions[rank // _EXPERT_PARALLEL]
        groups = [
            SavedGroup(group.partitions[rank], RANKS, len(dense), {}),
            SavedGroup(own, each, len(local), mark),
        ]
        _save_zero2(tag, rank, groups, scratch, moments=True)
    return _total(shapes)


def _save_zero2(tag: Path, rank: int, groups: Sequence[SavedGroup], scratch: Scratch, *, moments: bool) -> None:
    """Write one rank's optimizer states."""
    inner = {
        "state": {index: _moments(scratch, group.master) if moments else {} for index, group in enumerate(groups)},
        "param_groups": [group.mark | {"lr": 0.1, "params": [index]} for index, group in enumerate(groups)],
    }
    state = {
        "zero_stage": 2,
        "single_partition_of_fp32_groups": [group.master for group in groups],
        "partition_count": [group.ranks for group in groups],
        "param_alignment_paddings": [[0] * group.parameters for group in groups],
        "base_optimizer_state": inner,
    }
    name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, tag / name)


def _new(folder: Path) -> Path:
    tag = folder / TAG
    tag.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    return tag


def _masters(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=generator)


def _placed(scratch: Scratch, master: torch.Tensor, place: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Append a master with ``place``, and return the bf16 weight that the engine computes with."""
    place(master)
    weight = scratch.tensor(master.shape, torch.bfloat16)
    return weight.copy_(master)


def _moments(scratch: Scratch, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return moments of their real size, because tools that read whole files must read them, too."""
    first, second = (scratch.tensor(master.shape, torch.float32) for _ in range(2))
    return {"exp_avg": first.fill_(0.1), "exp_avg_sq": second.fill_(0.2), "step": torch.tensor(1.0)}


def _expert(name: str) -> int | None:
    _, _, behind = name.partition(".deepspeed_experts.")
    return int(behind.partition(".")[0]) if behind else None


def _expert_rank(name: str) -> int:
    return (_expert(name) or 0) // (_EXPERTS // _EXPERT_PARALLEL)


def _sizes(shapes: Shapes) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())


def _total(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
