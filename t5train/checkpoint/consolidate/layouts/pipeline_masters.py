"""The masters of a pipeline: each stage has its own optimizer and its own data-parallel ranks.

``TiedLayerSpec(..., tied_weight_attr=["word.weight"])`` ties one parameter of a module, but gives each of its stages a
copy of the module's other parameters too, such as position embeddings. A stage that does not use these never updates
them: there they keep their initial values, and their second moments, which sum squared gradients, are all zero.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate.layouts import zero12
from t5train.checkpoint.consolidate.layouts.module_states import ModuleStates
from t5train.checkpoint.consolidate.layouts.optimizer_states import FlatGroup, Master, ParameterGroup, packed_slots
from t5train.checkpoint.consolidate.layouts.pipeline import Stage, stages
from t5train.checkpoint.consolidate.layouts.zero0 import (
    in_place_groups,
    master_groups,
    partition_groups,
    require_full_precision,
)
from t5train.checkpoint.consolidate.opened_checkpoint import OpenedCheckpoint
from t5train.checkpoint.consolidate.plan import Source
from t5train.checkpoint.consolidate.span_reader import repeated_element
from t5train.checkpoint.consolidate.torch_file import StoredTensor, content_of
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Moved:
    """A parameter group without the parameters ``left_out``."""

    group: ParameterGroup
    left_out: frozenset[str]

    def masters(self) -> Mapping[str, Master]:
        return {name: master for name, master in self.group.masters().items() if name not in self.left_out}

    def moments(self, key: str) -> Mapping[str, Master]:
        return {name: moment for name, moment in self.group.moments(key).items() if name not in self.left_out}


def without_unmoved(groups: Sequence[ParameterGroup], tied: frozenset[str]) -> Sequence[ParameterGroup]:
    """Leave out copies of ``tied`` parameters that were never updated, if another copy was.

    Adam's second moments show which copies were updated. Without them, all copies are kept and must be equal.
    """
    squares = [_squares(group, tied) for group in groups]
    moved = {name for held in squares for name, source in held.items() if not _is_zero(source)}
    unmoved = [
        frozenset(name for name, source in held.items() if name in moved and _is_zero(source)) for held in squares
    ]
    for name in sorted(frozenset().union(*unmoved)):
        _log.warning("%s was updated in some pipeline stages only: using the updated copy", name)
    return [_Moved(group, names) if names else group for group, names in zip(groups, unmoved, strict=True)]


def _squares(group: ParameterGroup, tied: frozenset[str]) -> dict[str, Source]:
    if not tied & group.masters().keys():
        return {}
    try:
        moments = group.moments("exp_avg_sq")
    except UnknownLayout:
        return {}
    return {name: moment.source for name, moment in moments.items() if name in tied}


def _is_zero(source: Source) -> bool:
    element = repeated_element(source)
    return element is not None and not any(element)


_Slots = Sequence[Sequence[ParameterSlot]]


def partitioned(checkpoint: OpenedCheckpoint, module: ModuleStates) -> Sequence[ParameterGroup]:
    """The parameter groups of all stages, each partitioned over its stage's ranks (ZeRO 1 and BF16_Optimizer)."""
    groups = [
        group
        for stage in stages(checkpoint)
        for group in zero12.flat_groups(checkpoint, stage.optimizers, _slots(checkpoint, module, stage))
    ]
    return without_unmoved(groups, module.in_several_stages)


def replicated(checkpoint: OpenedCheckpoint, module: ModuleStates) -> Sequence[ParameterGroup]:
    """The parameter groups of all stages, each stored in full in its stage's model states (ZeRO 0)."""
    optimizers = [(stage.model or {}).get("optimizer") for stage in stages(checkpoint)]
    recorded = [_recorded(checkpoint, stage) or [] for stage in range(len(optimizers))]
    if not any(map(master_groups, optimizers)):
        require_full_precision(checkpoint, module)
        _require_weights(checkpoint, module, optimizers)
        return [group for each in zip(optimizers, recorded, strict=True) for group in in_place_groups(*each)]
    found: list[ParameterGroup] = []
    for stage, (held, slots) in enumerate(zip(map(partition_groups, optimizers), recorded, strict=True)):
        if len(held) != len(slots) or not held:
            raise UnknownLayout(
                f"the positions of the parameters in {checkpoint.folder} cannot be determined. The checkpoint was "
                f"saved with ZeRO 0, and pipeline stage {stage} has {len(held)} groups of fp32 masters, but the "
                f"sidecars record {len(slots)}. Save the checkpoint with ZeRO 1"
            )
        found += [FlatGroup(index, *group, padding=0) for index, group in enumerate(zip(held, slots, strict=True))]
    return found


def _require_weights(checkpoint: OpenedCheckpoint, module: ModuleStates, optimizers: Sequence[Any]) -> None:
    """Raise IncompleteCheckpoint if the module has fewer weights of a shape than the optimizers update.

    These optimizers do not name their parameters, so only this count reveals a missing layer file. A tied parameter
    has equal moments in all of its stages and is counted once. A parameter that was never updated has moments of
    zeros and is not counted.
    """
    states = [state for optimizer in optimizers if optimizer for state in optimizer.get("state", {}).values()]
    moments = [held for state in states if isinstance(held := state.get("exp_avg"), StoredTensor)]
    changing = {content_of(moment) for moment in moments if repeated_element(moment.source()) is None}
    moved = Counter(shape for _, shape, _ in changing)
    held = Counter(weight.shape for name, weight in module.weights.items() if name not in module.buffers)
    for shape, count in (moved - held).items():
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: a file layer_LL-model_states.pt is missing. The optimizer updates "
            f"{held[shape] + count} parameters of shape {shape}, but the layers' files hold {held[shape]}. Choose "
            "another tag"
        )


def _slots(checkpoint: OpenedCheckpoint, module: ModuleStates, stage: Stage) -> _Slots:
    """The positions of a stage's parameters: from its recorded shapes, which sidecars must confirm, or from sidecars.

    Without either, the parameters are assumed to lie in the order in which the optimizer names them. That order is not
    guaranteed, so it is verified later against the weights in the layers' files.
    """
    recorded = _recorded(checkpoint, stage.index)
    if recorded is not None and not (stage.model or {}).get("param_shapes"):
        return recorded
    groups = stage.parameters()
    paddings = stage.optimizers[0].get("param_alignment_paddings") or [None] * len(groups)
    if len(groups) != len(paddings):
        raise UnknownLayout(
            f"{checkpoint.folder}: the files contradict each other. Pipeline stage {stage.index} has {len(groups)} "
            f"parameter groups, but the paddings of {len(paddings)} groups are recorded. Choose another tag"
        )
    derived = [
        packed_slots([_named(checkpoint, module, name, shape) for name, shape in group.items()], padding)
        for group, padding in zip(groups, paddings, strict=True)
    ]
    if recorded not in (None, derived):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the sidecars and the model states of stage {stage.index} record different positions "
            "of parameters; choose another tag"
        )
    return derived


def _named(
    checkpoint: OpenedCheckpoint, module: ModuleStates, name: str, shape: tuple[int, ...] | None
) -> tuple[str, tuple[int, ...]]:
    """A parameter's name in the result, and its recorded shape or else that of its weight."""
    known = checkpoint.result_name(name)
    if shape is not None:
        return known, shape
    if known not in module.weights:
        raise UnknownLayout(
            f"{checkpoint.folder}: no file records the shape of {name}: save the checkpoint with ZeRO 1"
        )
    return known, module.weights[known].shape


def _recorded(checkpoint: OpenedCheckpoint, stage: int) -> list[list[ParameterSlot]] | None:
    """The groups that the sidecars of a stage's ranks record, which must be equal; None without sidecars."""
    if not checkpoint.sidecars:
        return None
    groups = [sidecar.groups for sidecar in checkpoint.sidecars if sidecar.layout.pipeline_rank == stage]
    if not groups or any(other != groups[0] for other in groups):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder}: the sidecars of pipeline stage {stage} are missing, or record different positions "
            "of parameters. Choose another tag"
        )
    return groups[0]
