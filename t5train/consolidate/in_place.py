"""ZeRO 0 in fp32: the optimizer moves the module's own weights, so that it adds nothing but its moments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5train.consolidate.masters import Master
from t5train.consolidate.metadata import StoredTensor
from t5train.consolidate.optimizer_files import inner_states
from t5train.errors import UnknownLayout
from t5train.sidecar import ParameterSlot


@dataclass(frozen=True)
class InPlaceGroup:
    """The optimizer's parameters in its order, and what it keeps of each."""

    slots: Sequence[ParameterSlot]
    states: Sequence[Mapping[str, Any]]

    def masters(self) -> dict[str, Master]:
        """None: the module's weights are the masters."""
        return {}

    def moments(self, key: str) -> dict[str, Master]:
        """Where the optimizer's tensor ``key`` of each parameter lies; UnknownLayout where there is none."""
        return {slot.name: self._moment(slot, state, key) for slot, state in zip(self.slots, self.states, strict=True)}

    def _moment(self, slot: ParameterSlot, state: Mapping[str, Any], key: str) -> Master:
        held = state.get(key)
        if not isinstance(held, StoredTensor) or held.shape != slot.shape or held.dtype != "F32":
            raise UnknownLayout(
                f"the optimizer keeps no {key} in fp32 of {slot.name}, as one of Adam's kind would; it keeps "
                f"{sorted(map(str, state)) or 'nothing'}: leave moments out"
            )
        return Master(held.shape, held.source())


def in_place_groups(optimizer: Any, recorded: Sequence[Sequence[ParameterSlot]]) -> list[InPlaceGroup]:
    """The optimizer's parameters as the sidecar records their order, without which nothing tells it."""
    slots = [slot for group in recorded for slot in group]
    return [InPlaceGroup(slots, inner_states(optimizer, len(slots)))] if slots else []
