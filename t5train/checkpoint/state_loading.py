"""Load training state from files into an engine of any layout, by Hugging Face's names.

Each rank's optimizer gets only the tensor ranges that it updates; modules get whole parameters.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from t5train.engine.collectives import expert_rank
from t5train.engine.engine import model_of
from t5train.engine.optimizer import Segment
from t5train.engine.parameter_layout import describe, huggingface_names
from t5train.engine.partitions import inner_optimizer, partitions_of
from t5train.errors import IncompleteCheckpoint, InputError
from t5train.model.initialization import Fill, initialise
from t5train.model.lora import is_adapter
from t5train.model.model_shape import T5Shape
from t5train.model.parameters import ParameterSlot
from t5train.model.starting_model import tensors_of
from t5train.model.tensor_files import StoredTensors, list_tensors
from t5train.records.stage_records import Weights
from t5train.spec.rank_job import Consolidated, TrainingProgress, TrainJob


def named_groups(engine: Any) -> list[list[ParameterSlot]]:
    """The groups of ``describe``, with Hugging Face's names. Experts are this rank's, numbered over all ranks."""
    model = model_of(engine)
    names = huggingface_names(model, expert_rank(model.expert_parallel_size))
    return [[slot.model_copy(update={"name": names[slot.name]}) for slot in group] for group in describe(engine)]


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StoredState:
    """fp32 weights and, if training has already begun, the optimizer's moments and the training progress."""

    weights: StoredTensors
    moments: Mapping[str, StoredTensors] = field(default_factory=dict)
    clock: TrainingProgress = field(default_factory=TrainingProgress)

    @classmethod
    def of(cls, job: TrainJob, shape: T5Shape) -> Self | None:
        """The state that the job's attempt begins with; None for DeepSpeed's, new weights or new adapters."""
        if job.consolidated:
            return cls._consolidated(job.consolidated)
        is_new = job.resume_tag is None and job.spec.finetune.lora.rank is None
        if is_new and (places := tensors_of(job.spec.model, shape)):
            return cls(StoredTensors(places))
        return None

    @classmethod
    def _consolidated(cls, consolidated: Consolidated) -> Self:
        """The state that ``consolidate`` wrote. Raises InputError if it has another fingerprint."""
        found = Weights.load(consolidated.folder).fingerprint
        if found != consolidated.fingerprint:
            raise InputError(
                f"{consolidated.folder} was changed: it holds weights with the fingerprint {found[:12]}, but this "
                f"attempt needs {consolidated.fingerprint[:12]}. Start the run again: it then writes these weights "
                "again"
            )
        stems = ("model", *(MOMENTS if consolidated.clock.has_moments else ()))
        model, *moments = (StoredTensors(list_tensors([consolidated.folder / f"{stem}.safetensors"])) for stem in stems)
        return cls(model, dict(zip(stems[1:], moments, strict=True)), consolidated.clock)

    def fill(self, name: str, parameter: nn.Parameter) -> None:
        """Set a module's parameter to its stored value, rounded to the parameter's type."""
        with torch.no_grad():
            parameter.copy_(self.weights.whole(name))

    def restore(self, engine: Any) -> None:
        """Copy the masters, bit for bit, and all other stored state into an engine whose module has been filled."""
        optimizer = inner_optimizer(engine)
        with torch.no_grad():
            for flat, parts in _held(engine):
                _copy(self.weights, parts, flat)
                state = optimizer.state_of(flat)
                state["step"].fill_(self.clock.optimizer_steps)
                for key, stored in self.moments.items():
                    _copy(stored, parts, state[key])
        engine.global_steps, engine.skipped_steps = self.clock.step, self.clock.skipped_steps
        engine.global_samples = self.clock.step * engine.train_batch_size()
        for name, value in self.clock.loss_scaler.items():
            setattr(engine.optimizer.loss_scaler, name, value)


def frozen_weights(job: TrainJob, shape: T5Shape) -> StoredTensors:
    """The weights that adapters are trained for: those of the model in ``model.start_from``."""
    return StoredTensors(tensors_of(job.spec.model, shape) or {})


def fill_of(job: TrainJob, shape: T5Shape, stored: StoredState | None) -> Fill:
    """What sets the values that the module begins with, by Hugging Face's names.

    They are the stored state's, or new ones. What a checkpoint of DeepSpeed replaces is not drawn, but set to NaN. A
    model that has adapters has the weights of ``frozen_weights``.
    """
    new = _not_drawn if job.resume_tag else partial(initialise, shape=shape, seed=job.spec.optimizer.seed)
    fill = stored.fill if stored else new
    if job.spec.finetune.lora.rank is None:
        return fill
    frozen = StoredState(frozen_weights(job, shape))

    def fill_adapted(name: str, parameter: nn.Parameter) -> None:
        (fill if is_adapter(name) else frozen.fill)(name, parameter)

    return fill_adapted


def _not_drawn(_name: str, parameter: nn.Parameter) -> None:
    """Set a parameter to NaN. No run trains on one that the checkpoint did not replace: see ``require_replaced``."""
    with torch.no_grad():
        parameter.fill_(math.nan)


def require_replaced(engine: Any, folder: Path) -> None:
    """Raise IncompleteCheckpoint if weights or masters of this rank are NaN after ``folder`` was loaded.

    A sum is NaN if one of its terms is, and needs no memory. At ZeRO 3, weights are copies of the masters.
    """
    masters = (
        (name, flat.detach().view(-1)[each.start : each.stop]) for flat, parts in _held(engine) for name, each in parts
    )
    for name, values in chain(model_of(engine).named_parameters(), masters):
        if values.detach().sum().isnan():
            raise IncompleteCheckpoint(
                f"cannot resume from {folder}: {name} is NaN after it was loaded, as if it were not in the checkpoint. "
                "Move that folder to another place to resume from an older checkpoint, and please report this bug"
            )


_Parts = list[tuple[str, Segment]]


def _held(engine: Any) -> Iterator[tuple[Tensor, _Parts]]:
    """Yield every tensor that this rank's optimizer updates, with the parts of parameters that it consists of."""
    groups = named_groups(engine)
    if not engine.zero_optimization():  # without ZeRO, the optimizer updates each parameter separately
        groups = [[slot] for group in groups for slot in group]
    for (flat, partition), slots in zip(partitions_of(engine).items(), groups, strict=True):
        yield flat, [(slots[segment.owner].name, segment) for segment in partition.segments]


def _copy(stored: StoredTensors, parts: _Parts, flat: Tensor) -> None:
    for name, (start, stop, _owner, _numel, first, _is_decayed) in parts:
        flat.view(-1)[start:stop].copy_(stored.stretch(name, first, first + stop - start))
