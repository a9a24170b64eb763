"""The stages of a pipeline: what each one's files tell of its part of the module.

``mp_rank_SS_model_states.pt`` has the shapes of stage SS's parameter groups, its buffers and the step, by the names
``LL.name`` and ``tied_modules.KEY.name``. With node-local storage DeepSpeed leaves out some stages' files, and with
BF16_Optimizer at ZeRO 0 the shapes; then the optimizer states of the stage's ranks tell the names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.consolidate import zero12
from t5train.consolidate.agreement import require_same
from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.module_states import model_states
from t5train.consolidate.state_files import StateFile, kind_of, numbered
from t5train.errors import UnknownLayout

TIED = "tied_modules."
_SAME_IN_EVERY_STAGE = (
    "ds_version", "global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage: its model states if there are any, and what each of its ranks saved of a partitioned optimizer."""

    index: int
    model: Mapping[str, Any] | None
    optimizers: Sequence[Mapping[str, Any]]

    def parameters(self) -> list[dict[str, tuple[int, ...] | None]]:
        """The parameter groups by DeepSpeed's names, in order, with the shapes where these are told."""
        if shapes := (self.model or {}).get("param_shapes"):
            return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]
        mappings = [optimizer.get("param_slice_mappings") or [] for optimizer in self.optimizers]
        return [dict.fromkeys(name for held in group for name in held) for group in zip(*mappings, strict=True)]

    def buffers(self) -> list[str]:
        """Buffers by DeepSpeed's names."""
        return list((self.model or {}).get("buffer_names") or ())


def stages(checkpoint: OpenedCheckpoint) -> list[Stage]:
    """Every stage of the pipeline, all files being of one run and step."""
    models = _models(checkpoint)
    dimensions = models[0].get("checkpoint_parallel_dimensions") or {}
    count = int(dimensions.get("pp_degree") or models[0].get("mp_world_size") or 1)
    if unknown := sorted(set(models) - set(range(count))):
        raise UnknownLayout(f"{checkpoint.folder} is a pipeline of {count} stages, and has model states of {unknown}")
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
