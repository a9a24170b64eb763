"""A pipeline: each layer's weights are in a separate file, and each stage has its own optimizer and ranks.

``layer_LL-model_states.pt`` holds the state dictionary of layer LL, with names relative to the layer. A tied module has
a master in each of its stages. It has a layer file only if a layer calls it without a custom forward function, and that
file does not record the tie.

``mp_rank_SS_model_states.pt`` records the step, the shapes of stage SS's parameter groups and its buffers, with the
names ``LL.name`` and ``tied_modules.KEY.name``. With node-local storage, DeepSpeed does not write this file for some
stages. With BF16_Optimizer at ZeRO 0, the file lacks the shapes. In both cases, the names are read from the optimizer
states of the stage's ranks.

``TiedLayerSpec(..., tied_weight_attr=["word.weight"])`` ties one parameter of a module, but gives each of its stages a
copy of the module's other parameters too, such as position embeddings. A stage that does not use these never updates
them: there they keep their initial values, and their second moments, which sum squared gradients, are all zero.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate import zero012
from t5train.checkpoint.consolidate.module_states import ModuleStates, model_states, step_of, tensors_of
from t5train.checkpoint.consolidate.opened_checkpoint import (
    OpenedCheckpoint,
    StateFile,
    kind_of,
    numbered,
    require_same,
)
from t5train.checkpoint.consolidate.optimizer_states import FlatGroup, ParameterGroup, packed_slots
from t5train.checkpoint.consolidate.plan import Location, Source
from t5train.checkpoint.consolidate.span_reader import repeated_element
from t5train.checkpoint.consolidate.torch_file import StoredTensor, content_of
from t5train.checkpoint.consolidate.zero012 import (
    in_place_groups,
    master_groups,
    partition_groups,
    require_full_precision,
)
from t5train.errors import IncompleteCheckpoint, UnknownLayout
from t5train.model.parameters import ParameterSlot

TIED = "tied_modules."
_SAME_IN_EVERY_STAGE = (
    "ds_version", "global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage: its model states, if any, and the partitioned optimizer state that each of its ranks saved."""

    index: int
    model: Mapping[str, Any] | None
    optimizers: Sequence[Mapping[str, Any]]

    def parameters(self) -> list[dict[str, tuple[int, ...] | None]]:
        """The parameter groups in order: each parameter's shape, or None if it is not recorded, by DeepSpeed's name."""
        if shapes := (self.model or {}).get("param_shapes"):
            return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]
        mappings = [optimizer.get("param_slice_mappings") or [] for optimizer in self.optimizers]
        return [dict.fromkeys(name for held in group for name in held) for group in zip(*mappings, strict=True)]

    def buffers(self) -> list[str]:
        """DeepSpeed's names of the buffers."""
        return list((self.model or {}).get("buffer_names") or ())


def stages(checkpoint: OpenedCheckpoint) -> list[Stage]:
    """Every stage of the pipeline, after checking that all files belong to one run and step."""
    models = _models(checkpoint)
    dimensions = models[0].get("checkpoint_parallel_dimensions") or {}
    count = int(dimensions.get("pp_degree") or models[0].get("mp_world_size") or 1)
    if unknown := sorted(set(models) - set(range(count))):
        raise UnknownLayout(
            f"{checkpoint.folder}: the files contradict each other. The pipeline has {count} stages, numbered from 0, "
            f"but there are model states of stages {unknown}. Choose another tag"
        )
    size = int(models[0].get("dp_world_size", 0))
    is_partitioned = any(kind_of(name) is StateFile.OPTIMIZER for name in checkpoint.names)
    return [
        Stage(stage, models.get(stage), zero012.optimizer_states(checkpoint, size, stage) if is_partitioned else [])
        for stage in range(count)
    ]


def _models(checkpoint: OpenedCheckpoint) -> dict[int, dict[str, Any]]:
    names = {0: checkpoint.first(StateFile.MODEL)}
    names |= {stage: name for (stage,), name in numbered(checkpoint.names, StateFile.OTHER_MODEL)}
    models = {stage: model_states(checkpoint, name) for stage, name in names.items()}
    require_same(checkpoint.folder, {names[stage]: model for stage, model in models.items()}, _SAME_IN_EVERY_STAGE)
    return models


_Shapes = Mapping[str, tuple[int, ...] | None]


def module_states(checkpoint: OpenedCheckpoint) -> ModuleStates:
    """The module states, from the layers' files.

    Without sidecars, a parameter is named ``LL.name``, or ``tied_modules.KEY.name`` if it is tied.
    """
    found = stages(checkpoint)
    shapes = {name: shape for stage in found for group in stage.parameters() for name, shape in group.items()}
    buffers = {name for stage in found for name in stage.buffers()}
    held = _held(checkpoint, shapes, buffers)
    trained = {checkpoint.result_name(name) for name in shapes}
    tied = {checkpoint.result_name(name) for name in shapes if name.startswith(TIED)} | _recorded_as_tied(checkpoint)
    return ModuleStates(
        weights={name: _weight(name, tensors) for name, tensors in held.items()},
        buffers=frozenset(map(checkpoint.result_name, buffers)),
        aliases=_aliases(checkpoint, found[0], held, trained),
        step=step_of(checkpoint, found[0].model or {}),
        without_values=frozenset(tied - held.keys()),
        in_several_stages=frozenset(tied),
    )


def _held(checkpoint: OpenedCheckpoint, shapes: _Shapes, buffers: Iterable[str]) -> dict[str, list[StoredTensor]]:
    """The layers' tensors, by their names in the result. A tied module with several files has several per name."""
    layers = {
        layer: tensors_of(checkpoint, checkpoint.read(name))
        for (layer,), name in numbered(checkpoint.names, StateFile.LAYER)
    }
    named = {int(name.split(".", 1)[0]) for name in (*shapes, *buffers) if not name.startswith(TIED)}
    if missing := sorted(named - layers.keys()):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder} lacks layer_{missing[0]:02d}-model_states.pt: the stages record parameters or "
            f"buffers of layers {missing}, but these layers have no files; choose another tag"
        )
    tied = {} if checkpoint.sidecars else _tied_layers(checkpoint, named, layers, shapes)
    held: dict[str, list[StoredTensor]] = {}
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            held.setdefault(checkpoint.result_name(f"{tied.get(layer, layer)}.{name}"), []).append(tensor)
    return held


def _tied_layers(
    checkpoint: OpenedCheckpoint, named: Set[int], layers: Mapping[int, Mapping[str, StoredTensor]], shapes: _Shapes
) -> dict[int, str]:
    """The layers that are tied modules: no stage names them, and their tensors match those of one tied module."""
    modules: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for name, shape in shapes.items():
        if name.startswith(TIED):
            key, rest = name.removeprefix(TIED).split(".", 1)
            modules.setdefault(TIED + key, {})[rest] = shape
    found: dict[int, str] = {}
    for layer in layers.keys() - named:
        fitting = [module for module, parameters in modules.items() if _fits(parameters, layers[layer])]
        if len(fitting) > 1:
            raise UnknownLayout(
                f"{checkpoint.folder} cannot be consolidated: the weights of layer {layer} fit several tied modules "
                f"({', '.join(fitting)}), and without sidecars nothing shows which one they belong to"
            )
        if fitting:
            found[layer] = fitting[0]
    return found


def _fits(parameters: _Shapes, tensors: Mapping[str, StoredTensor]) -> bool:
    return all(name in tensors and shape in (None, tensors[name].shape) for name, shape in parameters.items())


def _weight(name: str, tensors: Sequence[StoredTensor]) -> Location:
    first, *others = tensors
    if any(other.shape != first.shape for other in others):
        raise IncompleteCheckpoint(
            f"the files contradict each other: {name} has different shapes in different files, "
            f"{sorted({tensor.shape for tensor in tensors})}. Choose another tag"
        )
    return Location(first.shape, first.source(), tuple(other.source() for other in others))


def _recorded_as_tied(checkpoint: OpenedCheckpoint) -> set[str]:
    """The parameters of tied modules according to the sidecars, which also cover stages without model states."""
    table = checkpoint.sidecars[0].pipeline_layers if checkpoint.sidecars else {}
    paths = [path for layer, path in table.items() if layer.startswith(TIED)]
    names = {slot.name for sidecar in checkpoint.sidecars for group in sidecar.groups for slot in group}
    return {name for name in names for path in paths if not path or name.startswith(f"{path}.")}


def _aliases(
    checkpoint: OpenedCheckpoint, first: Stage, held: Mapping[str, Sequence[StoredTensor]], trained: set[str]
) -> dict[str, str]:
    """The owner of each alias. Only the first stage records ties: elsewhere, weights equal to trained ones are tied."""
    if checkpoint.sidecars:
        return dict(checkpoint.sidecars[0].aliases)
    aliases: dict[str, str] = dict((first.model or {}).get("shared_params") or {})
    owners = {content_of(held[name][0]): name for name in held if name in trained}
    for name in held.keys() - trained - aliases.keys():
        weight = held[name][0]
        owner = owners.get(content_of(weight))
        if owner and repeated_element(weight.source()) is None:  # constants, such as norms of ones, are not tied
            aliases[name] = owner
    return aliases


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Moved:
    """A parameter group without the parameters ``left_out``."""

    group: ParameterGroup
    left_out: frozenset[str]

    def masters(self) -> Mapping[str, Location]:
        return {name: master for name, master in self.group.masters().items() if name not in self.left_out}

    def moments(self, key: str) -> Mapping[str, Location]:
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
        for group in zero012.flat_groups(checkpoint, stage.optimizers, _slots(checkpoint, module, stage))
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
