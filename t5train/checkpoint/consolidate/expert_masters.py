"""The fp32 masters of a mixture of experts.

At ZeRO 0, ``expp_rank_{e}_mp_rank_00_optim_states.pt`` is the file of expert-parallel rank e, numbered as in the layer
with the most expert-parallel ranks. It holds the masters of that rank's experts and those of all dense parameters.

At ZeRO 1 and 2, a parameter group of experts is partitioned over the ranks that hold the same experts. One parameter
group in the files therefore stands for one group per expert-parallel rank. All of these have the same layout. Only rank
0's is stored, with experts numbered as on rank 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from t5train.checkpoint.consolidate import zero012
from t5train.checkpoint.consolidate.experts import ExpertName, ExpertRanks, expert_layers, expert_parallel_size
from t5train.checkpoint.consolidate.module_states import MODEL_STATES, ModuleStates, model_states
from t5train.checkpoint.consolidate.opened_checkpoint import (
    OpenedCheckpoint,
    StateFile,
    numbered,
    progress_of,
    require_same,
)
from t5train.checkpoint.consolidate.optimizer_states import FlatGroup, packed_slots
from t5train.checkpoint.consolidate.torch_file import StoredTensor
from t5train.checkpoint.consolidate.zero012 import master_groups, partition_groups, require_full_precision
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot
from t5train.quantities import quantity

_Groups = Sequence[Sequence[StoredTensor]]
Layouts = dict[tuple[str, int], list[ParameterSlot]]
"""The slots of each parameter group, by file name and index of the group."""


def replicated_groups(checkpoint: OpenedCheckpoint, module: ModuleStates) -> list[FlatGroup]:
    """The parameter groups of a ZeRO 0 optimizer; none if it updates the module's own weights."""
    optimizers = _optimizers(checkpoint)
    held = {file: master_groups(optimizer) for file, optimizer in optimizers.items()}
    if not any(held.values()):
        require_full_precision(checkpoint, module)
        return []
    sources = _sources(checkpoint, optimizers)
    slots = _recorded(checkpoint, sources) if checkpoint.sidecars else _in_module_order(checkpoint, module, held)
    return [
        FlatGroup(index, partition_groups(optimizers[file])[index], slots[file, index], padding=0)
        for file, index in sources
    ]


def _optimizers(checkpoint: OpenedCheckpoint) -> dict[str, Mapping[str, Any]]:
    """Each file's optimizer state, after checking that all expert-parallel ranks are present and at the same step."""
    found = {name: _optimizer(checkpoint, name) for name in _files(checkpoint)}
    progress = {name: progress_of(_inner(optimizer)) for name, optimizer in found.items()}
    require_same(checkpoint.folder, progress, ["parameter groups", "optimizer steps", "learning rates"])
    expected = max((size or 1 for size in _sizes(next(iter(found.values())))), default=1)
    checkpoint.files_by_rank(StateFile.EXPERT_OPTIMIZER, expected)
    return found


def _optimizer(checkpoint: OpenedCheckpoint, name: str) -> Mapping[str, Any]:
    optimizer = checkpoint.read(name).get("optimizer")
    if not isinstance(optimizer, Mapping):
        raise UnknownLayout(
            f"{checkpoint.folder / name} holds no optimizer states: the entry 'optimizer' is a "
            f"{type(optimizer).__name__}, not a dictionary. Choose another tag"
        )
    return optimizer


def _files(checkpoint: OpenedCheckpoint) -> list[str]:
    return [name for _, name in numbered(checkpoint.names, StateFile.EXPERT_OPTIMIZER)]


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of torch's optimizer, which DeepSpeed wraps for low precision."""
    inner: Mapping[str, Any] = optimizer.get("optimizer_state_dict", optimizer)
    return inner


def _sizes(optimizer: Mapping[str, Any]) -> list[int | None]:
    """The expert-parallel size of each parameter group; None for a dense group."""
    return [expert_parallel_size(group) for group in _inner(optimizer).get("param_groups", ())]


def _sources(checkpoint: OpenedCheckpoint, optimizers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The file and index of every distinct parameter group.

    A dense group is read once, from the first file; a group of experts, once for each expert-parallel rank.
    """
    ranks, writers = ExpertRanks.of(model_states(checkpoint, MODEL_STATES)), _writers(checkpoint)
    return [
        (next(file for file, writer in writers.items() if writer in holders), index)
        for index, size in enumerate(_sizes(next(iter(optimizers.values()))))
        for holders in ranks.holding(size or 1)
    ]


def _writers(checkpoint: OpenedCheckpoint) -> dict[str, int]:
    """The data-parallel rank that wrote each file: the first of those with the same experts."""
    files, ranks = _files(checkpoint), ExpertRanks.of(model_states(checkpoint, MODEL_STATES))
    return {file: holders[0] for file, holders in zip(files, ranks.holding(len(files)), strict=True)}


def _recorded(checkpoint: OpenedCheckpoint, sources: Sequence[tuple[str, int]]) -> Layouts:
    """The layouts recorded in the sidecar of the rank that wrote each file."""
    groups = {sidecar.layout.data_parallel_rank: sidecar.groups for sidecar in checkpoint.sidecars}
    writers = _writers(checkpoint)
    for file, index in sources:
        if index >= len(groups.get(writers[file], ())):
            raise IncompleteCheckpoint(
                f"{checkpoint.folder / file} has a parameter group {index}, but the sidecar of data-parallel rank "
                f"{writers[file]} does not record this group. Choose another tag"
            )
    return {(file, index): groups[writers[file]][index] for file, index in sources}


def _in_module_order(checkpoint: OpenedCheckpoint, module: ModuleStates, held: Mapping[str, _Groups]) -> Layouts:
    """The layouts if parameters lie in the module's order; the order is verified later against the weights.

    No other order is possible with one dense group, one expert-parallel size and no frozen parameters. In all other
    cases, raises UnknownLayout. DeepSpeed may have split the experts into several groups by size.
    """
    sizes = _sizes(checkpoint.read(next(iter(held)))["optimizer"])
    if sizes.count(None) != 1 or len(set(sizes)) != 2:
        raise _undeterminable(
            checkpoint,
            f"{sizes.count(None)} dense parameter groups and the expert-parallel sizes "
            f"{sorted({size for size in sizes if size is not None})} (needed: one of each)",
        )
    untrained = module.buffers | module.aliases.keys()
    trained = {name: weight.shape for name, weight in module.weights.items() if name not in untrained}
    dense = sizes.index(None)
    experts = [index for index, size in enumerate(sizes) if size]
    layouts: Layouts = {}
    for expert_rank, (file, groups) in enumerate(held.items()):
        own = _names_of_rank(checkpoint, expert_rank, len(held))
        for indices, names in (([dense], [name for name in trained if ExpertName.parse(name) is None]), (experts, own)):
            shapes = [(name, trained[name]) for name in names if name in trained]
            cut = _cut(shapes, [sum(master.num_elements for master in groups[index]) for index in indices])
            if cut is None:
                raise _undeterminable(
                    checkpoint,
                    f"{quantity(len(shapes), 'parameter')} of sizes that do not match the parameter groups {indices}",
                )
            layouts |= {(file, index): slots for index, slots in zip(indices, cut, strict=True)}
    return layouts


def _names_of_rank(checkpoint: OpenedCheckpoint, expert_rank: int, num_ranks: int) -> list[str]:
    """The names of the tensors of an expert-parallel rank's experts, in the module's order."""
    own = []
    for layer in expert_layers(checkpoint):
        each = len(layer.experts) // num_ranks
        own += [name for expert in layer.experts[expert_rank * each : (expert_rank + 1) * each] for name in expert]
    return own


def _cut(shapes: Sequence[tuple[str, tuple[int, ...]]], sizes: Sequence[int]) -> list[list[ParameterSlot]] | None:
    """Split consecutive parameters into groups with these numbers of elements; None if they do not fit exactly."""
    cut, left = [], list(shapes)
    for size in sizes:
        taken: list[tuple[str, tuple[int, ...]]] = []
        while left and sum(math.prod(shape) for _, shape in taken) < size:
            taken.append(left.pop(0))
        slots = packed_slots(taken)
        if sum(slot.numel for slot in slots) != size:
            return None
        cut.append(slots)
    return None if left else cut


def _undeterminable(checkpoint: OpenedCheckpoint, seen: str) -> UnknownLayout:
    return UnknownLayout(
        f"the positions of the parameters in {checkpoint.folder} cannot be determined. The checkpoint was saved with "
        f"ZeRO 0, has no sidecars, and has {seen}. Save the checkpoint with ZeRO 1"
    )


def partitioned_groups(checkpoint: OpenedCheckpoint, _module: ModuleStates) -> list[FlatGroup]:
    """The parameter groups of a ZeRO 1 or 2 optimizer, with each group of experts once per expert-parallel rank."""
    model = model_states(checkpoint, MODEL_STATES)
    ranks = ExpertRanks.of(model)
    states = zero012.optimizer_states(checkpoint, ranks.size)
    counts = {layer.path: len(layer.experts) for layer in expert_layers(checkpoint)}
    found: list[FlatGroup] = []
    recorded: list[list[Sequence[ParameterSlot]]] = [[] for _ in states]
    for index, stored in enumerate(zero012.stored_slots(checkpoint, model, states[0])):
        size = _expert_parallel_size(checkpoint, states[0], index, stored)
        for expert_rank, holders in enumerate(ranks.holding(size)):
            slots = [_of_rank(checkpoint, slot, expert_rank, size, counts) for slot in stored]
            partitions = [zero012.partition(states[rank], index) for rank in holders]
            found.append(FlatGroup(index, partitions, slots, zero012.ALIGNED_ELEMENTS * len(holders)))
            for rank in holders:
                recorded[rank].append(slots)
    zero012.require_recorded(checkpoint, recorded)
    return found


def _expert_parallel_size(
    checkpoint: OpenedCheckpoint, state: Mapping[str, Any], index: int, slots: Sequence[ParameterSlot]
) -> int:
    """The number of expert-parallel ranks that a group is spread over; 1 if it is dense.

    Raises UnknownLayout unless the partition count, the optimizer's record and the parameters' names agree.
    """
    num_ranks = ExpertRanks.of(model_states(checkpoint, MODEL_STATES)).size
    cut_over = int(_entry(state.get("partition_count"), index) or 0)
    size = num_ranks // cut_over if cut_over and num_ranks % cut_over == 0 else 0
    of_experts = {ExpertName.parse(slot.name) is not None for slot in slots}
    recorded = _recorded_size(state, index)
    if not size or len(of_experts) != 1 or (size > 1 and of_experts == {False}) or recorded not in (None, size):
        raise UnknownLayout(
            f"{checkpoint.folder}: the records of parameter group {index} contradict each other. The group is "
            f"partitioned over {cut_over} of {num_ranks} ranks, the optimizer records the expert-parallel size "
            f"{recorded}, and the group holds {[slot.name for slot in slots][:3]}; choose another tag"
        )
    return size


def _recorded_size(state: Mapping[str, Any], index: int) -> int | None:
    inner = state.get("base_optimizer_state")
    group = _entry(inner.get("param_groups") if isinstance(inner, Mapping) else None, index)
    return expert_parallel_size(group) if isinstance(group, Mapping) else None


def _entry(items: Any, index: int) -> Any:
    return items[index] if isinstance(items, list) and index < len(items) else None


def _of_rank(
    checkpoint: OpenedCheckpoint, slot: ParameterSlot, expert_rank: int, size: int, counts: Mapping[str, int]
) -> ParameterSlot:
    """Translate a slot of rank 0 to another expert-parallel rank, with the tensor's name in the result."""
    name = ExpertName.parse(slot.name)
    if name is None:
        return slot.model_copy(update={"name": checkpoint.result_name(slot.name)})
    count = counts.get(name.layer, 0)
    if count % size or name.expert >= count // size:
        raise UnknownLayout(
            f"{checkpoint.folder}: the files contradict each other. The expert number in {slot.name} does not fit "
            f"{count} experts on {size} expert-parallel ranks. Choose another tag"
        )
    everywhere = replace(name, expert=expert_rank * (count // size) + name.expert)
    return slot.model_copy(update={"name": checkpoint.result_name(str(everywhere))})
