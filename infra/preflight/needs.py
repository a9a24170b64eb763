"""What a launch asks of its hosts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Needs:
    """Of all hosts together, and of each."""

    slots: Mapping[str, tuple[int, ...]]
    """Accelerators of each host that its ranks are to use, in the hostfile's order; the ranks meet on the first."""
    root: Path
    accelerator: str | None = None
    """DeepSpeed's name for it; found on the nodes when None."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that ranks get from the head."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The run's, as JSON."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Host memory that the ranks of each host take."""
    root_bytes: int = 0
    """What the run will write under the root."""
    operators: tuple[str, ...] = ()
    """DeepSpeed's compiled operators that ranks load."""
    master_address: str | None = None
    master_port: int | None = None
    launcher: str = "pdsh"

    @property
    def first(self) -> str:
        """The host where the ranks meet."""
        return next(iter(self.slots))

    @property
    def num_ranks(self) -> int:
        """On all hosts."""
        return sum(len(slots) for slots in self.slots.values())
