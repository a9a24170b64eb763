"""The optimizer's half of a checkpoint: an fp32 master for each parameter it trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.module_states import ModuleStates
from t5train.consolidate.plan import Source


@dataclass(frozen=True)
class Partition:
    """One flat tensor of masters as a file holds it, and what the optimizer keeps of it beside (its moments)."""

    master: StoredTensor
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Master:
    """Where a parameter's fp32 master lies."""

    shape: tuple[int, ...]
    source: Source


class ParameterGroup(Protocol):
    """Masters that are stored together, by one rule."""

    def masters(self) -> Mapping[str, Master]:
        """Each parameter's master, after every element of the group was accounted for."""
        ...


ReadGroups = Callable[[OpenedCheckpoint, ModuleStates], Sequence[ParameterGroup]]
"""The other half of a layout: finds the masters of every parameter group, by the names the result will have."""
