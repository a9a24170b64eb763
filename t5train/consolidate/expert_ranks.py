"""Which data-parallel ranks hold which experts.

W ranks are ep expert-parallel times edp expert-data-parallel ones: expert-parallel rank e holds experts ``e * n`` to
``e * n + n - 1`` of a layer, n being its experts divided by ep, and so do edp ranks in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from t5train.errors import UnknownLayout

_CONSECUTIVE = "use_data_before_expert_parallelism"
_GROUP_NAME = "ep_size_"


@dataclass(frozen=True)
class ExpertRanks:
    """``size`` ranks that share experts. Those with the same experts are every ep-th, or ``consecutive``."""

    size: int
    consecutive: bool

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> "ExpertRanks":
        """As the model states tell, which hold DeepSpeed's configuration.

        Older versions kept only the path of its file. Then the default is supposed, which weights bear out or refuse.
        """
        configuration = model.get("ds_config")
        consecutive = isinstance(configuration, Mapping) and bool(configuration.get(_CONSECUTIVE, False))
        return cls(int(model.get("dp_world_size", 0)), consecutive)

    def holding(self, expert_parallel_size: int) -> list[list[int]]:
        """For each expert-parallel rank, the ranks that hold its experts, in the order they are numbered."""
        if expert_parallel_size < 1 or self.size % expert_parallel_size:
            raise UnknownLayout(f"{self.size} ranks cannot be {expert_parallel_size} expert-parallel ones")
        each = self.size // expert_parallel_size
        if self.consecutive:
            return [list(range(first, first + each)) for first in range(0, self.size, each)]
        return [list(range(first, self.size, expert_parallel_size)) for first in range(expert_parallel_size)]


def expert_parallel_size(group: Mapping[str, Any]) -> int | None:
    """That of an optimizer's parameter group, as DeepSpeed names groups of experts; None for a dense group."""
    if not group.get("moe"):
        return None
    name = str(group.get("name"))
    size = name.removeprefix(_GROUP_NAME)
    if not name.startswith(_GROUP_NAME) or not size.isdecimal():
        raise UnknownLayout(
            f"a parameter group of experts is named {name!r}: DeepSpeed's are {_GROUP_NAME}1, and so on"
        )
    return int(size)
