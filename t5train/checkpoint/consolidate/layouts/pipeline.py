"""The module of a pipeline: each layer's weights are in a separate file.

``layer_LL-model_states.pt`` holds the state dictionary of layer LL, with names relative to the layer. A tied module has
a master in each of its stages. It has a layer file only if a layer calls it without a custom forward function, and that
file does not record the tie.

``mp_rank_SS_model_states.pt`` records the step, the shapes of stage SS's parameter groups and its buffers, with the
names ``LL.name`` and ``tied_modules.KEY.name``. With node-local storage, DeepSpeed does not write this file for some
stages. With BF16_Optimizer at ZeRO 0, the file lacks the shapes. In both cases, the names are read from the optimizer
states of the stage's ranks.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from t5train.checkpoint.consolidate.consistency import require_same
from t5train.checkpoint.consolidate.layouts import zero12
from t5train.checkpoint.consolidate.layouts.module_states import ModuleStates, Weight, model_states, step_of, tensors_of
from t5train.checkpoint.consolidate.opened_checkpoint import (
    OpenedCheckpoint,
    StateFile,
    kind_of,
    numbered,
)
from t5train.checkpoint.consolidate.span_reader import repeated_element
from t5train.checkpoint.consolidate.torch_file import StoredTensor, content_of
from t5train.errors import IncompleteCheckpoint, UnknownLayout

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
        Stage(stage, models.get(stage), zero12.optimizer_states(checkpoint, size, stage) if is_partitioned else [])
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
    checkpoint: OpenedCheckpoint,
    named: Set[int],
    layers: Mapping[int, Mapping[str, StoredTensor]],
    shapes: _Shapes,
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


def _weight(name: str, tensors: Sequence[StoredTensor]) -> Weight:
    first, *others = tensors
    if any(other.shape != first.shape for other in others):
        raise IncompleteCheckpoint(
            f"the files contradict each other: {name} has different shapes in different files, "
            f"{sorted({tensor.shape for tensor in tensors})}. Choose another tag"
        )
    return Weight(first.shape, first.source(), tuple(other.source() for other in others))


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
