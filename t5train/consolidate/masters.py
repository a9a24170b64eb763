"""The optimizer's half of a checkpoint: an fp32 master for each parameter it trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.module_states import ModuleStates
from t5train.consolidate.plan import Source
from t5train.errors import UnknownLayout


@dataclass(frozen=True)
class Partition:
    """One flat tensor of masters as a file holds it, and what the optimizer keeps of it beside (its moments)."""

    master: StoredTensor
    state: Mapping[str, Any] = field(default_factory=dict)

    def moment(self, key: str, padding: int) -> StoredTensor:
        """The optimizer's tensor ``key`` of the same elements; up to ``padding`` more may follow there.

        Raises UnknownLayout when there is none, or one of another size.
        """
        held, size = self.state.get(key), self.master.num_elements
        if not size:
            return self.master
        if not isinstance(held, StoredTensor):
            raise UnknownLayout(
                f"{self.master.file} holds no {key} of the masters beside it: of Adam's moments it would; "
                f"its optimizer keeps {sorted(map(str, self.state)) or 'nothing'}: leave moments out"
            )
        if held.shape == self.master.shape:
            return held
        if held.strides != (1,) or not size <= held.num_elements <= size + padding:
            raise UnknownLayout(
                f"{self.master.file} holds {key} of shape {held.shape} for masters of shape {self.master.shape}"
            )
        return replace(held, shape=(size,))


@dataclass(frozen=True)
class Master:
    """Where a parameter's fp32 master lies, or one of its moments; ``copies`` are to be equal bit for bit."""

    shape: tuple[int, ...]
    source: Source
    copies: tuple[Source, ...] = ()


class ParameterGroup(Protocol):
    """Masters that are stored together, by one rule."""

    def masters(self) -> Mapping[str, Master]:
        """Each parameter's master, after every element of the group was accounted for."""
        ...

    def moments(self, key: str) -> Mapping[str, Master]:
        """The optimizer's tensor ``key`` (``"exp_avg"``) of each parameter; UnknownLayout where there is none."""
        ...


ReadGroups = Callable[[OpenedCheckpoint, ModuleStates], Sequence[ParameterGroup]]
"""The other half of a layout: finds the masters of every parameter group, by the names the result will have."""
