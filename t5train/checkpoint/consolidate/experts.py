"""The module of a mixture of experts (DeepSpeed's ``MoE``): each expert has its own file, numbered over all ranks.

``mp_rank_00_model_states.pt`` holds everything but the experts. ``layer_{L}_expert_{E}_mp_rank_00_model_states.pt``
holds expert E of MoE layer L. All other data that names experts (shapes, buffers, ties) was written by rank 0, which
numbers its own experts from 0.

The number of ranks is the expert-parallel size ep times the expert-data-parallel size edp. If a layer has ``ep * n``
experts, expert-parallel rank e holds experts ``e * n`` to ``e * n + n - 1``, and edp ranks hold the same experts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from t5train.checkpoint.consolidate.module_states import (
    MODEL_STATES,
    ModuleStates,
    model_states,
    states_of,
    whole_module,
)
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint, StateFile, numbered
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.errors import IncompleteCheckpoint, UnknownLayout

_NAME = re.compile(r"(.+)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ExpertName:
    """The name of an expert's parameter or buffer: ``layer`` is the path of the MoE layer in the module."""

    layer: str
    expert: int
    tensor: str

    @classmethod
    def parse(cls, name: str) -> "ExpertName | None":
        """Parse a name; None if it is not the name of an expert's tensor."""
        match = _NAME.fullmatch(name)
        return cls(match[1], int(match[2]), match[3]) if match else None

    def __str__(self) -> str:
        return f"{self.layer}.deepspeed_moe.experts.deepspeed_experts.{self.expert}.{self.tensor}"


@dataclass(frozen=True)
class StoredExperts:
    """One MoE layer: its path in the module, and each expert's tensors by their names in the files."""

    path: str
    experts: Sequence[Mapping[str, StoredTensor]]


def module_states(checkpoint: OpenedCheckpoint) -> ModuleStates:
    """The module states, including the experts."""
    model = whole_module(checkpoint)
    layers = expert_layers(checkpoint)
    tensors = dict(model["module"])
    for layer in layers:
        for expert in layer.experts:
            tensors |= expert
    buffers = [*(model.get("buffer_names") or ()), *_expert_buffers(model, layers)]
    everything = {"module": tensors, "buffer_names": buffers, "shared_params": _ties(model, layers)}
    return states_of(checkpoint, model | everything)


def expert_layers(checkpoint: OpenedCheckpoint) -> list[StoredExperts]:
    """The MoE layers in the module's order, after checking that every expert's file matches its name."""
    counts = model_states(checkpoint, MODEL_STATES).get("num_experts")
    if not isinstance(counts, list) or not all(isinstance(n, int) and n > 0 for n in counts):
        raise UnknownLayout(
            f"{checkpoint.folder / MODEL_STATES}: num_experts is {counts!r}, but must be a list of positive numbers, "
            "one for each MoE layer. Choose another tag"
        )
    files = {(layer, expert): name for (layer, expert), name in numbered(checkpoint.names, StateFile.EXPERT)}
    expected = {(layer, expert) for layer, count in enumerate(counts) for expert in range(count)}
    if files.keys() != expected:
        layer, expert = min(files.keys() ^ expected)
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the MoE layers have {counts} experts, but the file of expert {expert} of layer "
            f"{layer} is {'missing' if (layer, expert) in expected else 'one too many'}; choose another tag"
        )
    layers = [
        _layer(checkpoint, [files[layer, expert] for expert in range(count)]) for layer, count in enumerate(counts)
    ]
    _require_distinct(checkpoint, [layer.path for layer in layers])
    _require_recorded(checkpoint, layers)
    return layers


def _layer(checkpoint: OpenedCheckpoint, files: Sequence[str]) -> StoredExperts:
    """One layer from the files of its experts, in order."""
    contents = [checkpoint.read(file) for file in files]
    first = ExpertName.parse(next(iter(contents[0]), ""))
    shapes = {_local(name): _shape(item) for name, item in contents[0].items()}
    for expert, (file, content) in enumerate(zip(files, contents, strict=True)):
        strangers = [name for name in content if not _is_of(name, first, expert)]
        if strangers or {_local(name): _shape(item) for name, item in content.items()} != shapes:
            raise IncompleteCheckpoint(
                f"{checkpoint.folder / file} should hold expert {expert} of the same layer as {files[0]}, but holds "
                f"{', '.join(strangers[:1] or sorted(content)[:3])}. The file was probably renamed, or copied from "
                "another checkpoint; choose another tag"
            )
    return StoredExperts(first.layer if first else "", contents)


def _is_of(name: str, first: ExpertName | None, expert: int) -> bool:
    parsed = ExpertName.parse(name)
    return first is not None and parsed is not None and (parsed.layer, parsed.expert) == (first.layer, expert)


def _local(name: str) -> str:
    parsed = ExpertName.parse(name)
    return parsed.tensor if parsed else name


def _shape(item: Any) -> tuple[Any, ...]:
    return (item.dtype, item.shape) if isinstance(item, StoredTensor) else ()


def _require_distinct(checkpoint: OpenedCheckpoint, paths: Sequence[str]) -> None:
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise IncompleteCheckpoint(
                f"{checkpoint.folder}: the files of layers {paths.index(path)} and {index} both hold the experts of "
                f"{path}, so files were renamed. Choose another tag"
            )


def _require_recorded(checkpoint: OpenedCheckpoint, layers: Sequence[StoredExperts]) -> None:
    if not checkpoint.sidecars:
        return
    prefix = checkpoint.sidecars[0].model_prefix
    recorded = {prefix + layer.module: layer.num_experts for layer in checkpoint.sidecars[0].expert_layers}
    found = {layer.path: len(layer.experts) for layer in layers}
    if found != recorded:
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the numbers of experts in each layer are {found} in the files, but {recorded} in "
            "the sidecars; choose another tag"
        )


def _expert_buffers(model: Mapping[str, Any], layers: Iterable[StoredExperts]) -> list[str]:
    """The buffers of all experts. Only those of rank 0's experts are recorded; all experts have the same ones."""
    kinds = {_kind(name) for name in model.get("buffer_names") or () if ExpertName.parse(name)}
    return [name for layer in layers for expert in layer.experts for name in expert if _kind(name) in kinds]


def _kind(name: str) -> tuple[str, str]:
    parsed = ExpertName.parse(name)
    return (parsed.layer, parsed.tensor) if parsed else ("", name)


def _ties(model: Mapping[str, Any], layers: Sequence[StoredExperts]) -> dict[str, str]:
    """The owner of each alias. A tie inside an expert of rank 0 applies to every expert of its layer."""
    ties: dict[str, str] = {}
    for alias, owner in (model.get("shared_params") or {}).items():
        inside, outside = ExpertName.parse(alias), ExpertName.parse(owner)
        if inside is None and outside is None:
            ties[alias] = owner
        elif inside and outside and (inside.layer, inside.expert) == (outside.layer, outside.expert):
            count = sum(len(layer.experts) for layer in layers if layer.path == inside.layer)
            ties |= {str(replace(inside, expert=e)): str(replace(outside, expert=e)) for e in range(count)}
        else:
            raise UnknownLayout(
                f"{alias} is tied to {owner}, which is not supported: an expert's weights can only be tied to weights "
                "of the same expert"
            )
    return ties


_CONSECUTIVE = "use_data_before_expert_parallelism"
_GROUP_NAME = "ep_size_"


@dataclass(frozen=True)
class ExpertRanks:
    """How experts are distributed over ``size`` ranks.

    With an expert-parallel size of ep, every ep-th rank holds the same experts; if ``consecutive``, consecutive ranks
    do.
    """

    size: int
    consecutive: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "ExpertRanks":
        """Read the distribution from DeepSpeed's configuration in the model states.

        Older versions stored only the path of the configuration file. For these, DeepSpeed's default is assumed, and
        verified later against the weights.
        """
        configuration = model.get("ds_config")
        consecutive = isinstance(configuration, Mapping) and bool(configuration.get(_CONSECUTIVE, False))
        return cls(int(model.get("dp_world_size", 0)), consecutive)

    def holding(self, expert_parallel_size: int) -> list[list[int]]:
        """The ranks that hold the experts of each expert-parallel rank, in ascending order."""
        if expert_parallel_size < 1 or self.size % expert_parallel_size:
            raise UnknownLayout(
                f"the files contradict each other: the checkpoint's {self.size} data-parallel ranks cannot be divided "
                f"into {expert_parallel_size} expert-parallel ranks. Choose another tag"
            )
        each = self.size // expert_parallel_size
        if self.consecutive:
            return [list(range(first, first + each)) for first in range(0, self.size, each)]
        return [list(range(first, self.size, expert_parallel_size)) for first in range(expert_parallel_size)]


def expert_parallel_size(group: Mapping[str, Any]) -> int | None:
    """The expert-parallel size in the name of an optimizer's parameter group; None for a dense group."""
    if not group.get("moe"):
        return None
    name = str(group.get("name"))
    size = name.removeprefix(_GROUP_NAME)
    if not name.startswith(_GROUP_NAME) or not size.isdecimal():
        raise UnknownLayout(
            f"the expert-parallel size of a parameter group is unknown: the group is named {name!r}, not "
            f"{_GROUP_NAME}N as DeepSpeed names it. Save the checkpoint with DeepSpeed's own group names"
        )
    return int(size)
