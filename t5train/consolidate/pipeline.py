"""The module of a pipeline: each layer's weights in a file of its own.

``layer_LL-model_states.pt`` holds the state dictionary of layer LL, under the names it has within the layer. A tied
module has a master in each of its stages, but a layer's file only where a layer calls it without a function of its
own; the file does not say that it is tied.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.metadata import StoredTensor, content_of
from t5train.consolidate.module_states import ModuleStates, Weight, step_of, tensors_of
from t5train.consolidate.pipeline_stages import TIED, Stage, stages
from t5train.consolidate.reading import repeated_element
from t5train.consolidate.state_files import StateFile, numbered
from t5train.errors import IncompleteCheckpoint, UnknownLayout

_Shapes = Mapping[str, tuple[int, ...] | None]


def module_states(checkpoint: OpenedCheckpoint) -> ModuleStates:
    """What the layers' files hold; parameters are called ``LL.name``, or ``tied_modules.KEY.name`` if tied."""
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
    """The layers' tensors by the names the result will have; several of a tied module with several files."""
    layers = {
        layer: tensors_of(checkpoint, checkpoint.read(name))
        for (layer,), name in numbered(checkpoint.names, StateFile.LAYER)
    }
    named = {int(name.split(".", 1)[0]) for name in (*shapes, *buffers) if not name.startswith(TIED)}
    if missing := sorted(named - layers.keys()):
        raise IncompleteCheckpoint(
            f"{checkpoint.folder} lacks layer_{missing[0]:02d}-model_states.pt: its stages tell of parameters or "
            f"buffers of the layers {missing}, and no file of these is there; choose another tag"
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
    """Which layers are tied modules: those that no stage names, and that hold what it says of one tied module."""
    modules: dict[str, dict[str, tuple[int, ...] | None]] = {}
    for name, shape in shapes.items():
        if name.startswith(TIED):
            key, rest = name.removeprefix(TIED).split(".", 1)
            modules.setdefault(TIED + key, {})[rest] = shape
    found: dict[int, str] = {}
    for layer in layers.keys() - named:
        fitting = [module for module, parameters in modules.items() if _fits(parameters, layers[layer])]
        if len(fitting) > 1:
            raise UnknownLayout(f"{checkpoint.folder}: which of {fitting} is layer {layer} cannot be told: all fit")
        if fitting:
            found[layer] = fitting[0]
    return found


def _fits(parameters: _Shapes, tensors: Mapping[str, StoredTensor]) -> bool:
    return all(name in tensors and shape in (None, tensors[name].shape) for name, shape in parameters.items())


def _weight(name: str, tensors: Sequence[StoredTensor]) -> Weight:
    first, *others = tensors
    if any(other.shape != first.shape for other in others):
        raise IncompleteCheckpoint(f"{name} has several shapes: {sorted({tensor.shape for tensor in tensors})}")
    return Weight(first.shape, first.source(), tuple(other.source() for other in others))


def _recorded_as_tied(checkpoint: OpenedCheckpoint) -> set[str]:
    """The parameters of tied modules where sidecars have them, which is also for stages without model states."""
    table = checkpoint.sidecars[0].pipeline_layers if checkpoint.sidecars else {}
    paths = [path for layer, path in table.items() if layer.startswith(TIED)]
    names = {slot.name for sidecar in checkpoint.sidecars for group in sidecar.groups for slot in group}
    return {name for name in names for path in paths if not path or name.startswith(f"{path}.")}


def _aliases(
    checkpoint: OpenedCheckpoint, first: Stage, held: Mapping[str, Sequence[StoredTensor]], trained: set[str]
) -> dict[str, str]:
    """Alias to owner. Only the first stage records its ties: elsewhere a weight that equals a trained one is tied."""
    if checkpoint.sidecars:
        return dict(checkpoint.sidecars[0].aliases)
    aliases: dict[str, str] = dict((first.model or {}).get("shared_params") or {})
    owners = {content_of(held[name][0]): name for name in held if name in trained}
    for name in held.keys() - trained - aliases.keys():
        weight = held[name][0]
        owner = owners.get(content_of(weight))
        if owner and repeated_element(weight.source()) is None:  # two norms of ones are no tie
            aliases[name] = owner
    return aliases
