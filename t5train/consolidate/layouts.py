"""Which layout a checkpoint has, told by the names of its files, and the module that knows its rules."""

import re
from typing import Protocol

from t5train.consolidate import replicated, zero12
from t5train.consolidate.checkpoint import OpenedCheckpoint
from t5train.consolidate.plan import Plan
from t5train.errors import UnknownLayout


class Layout(Protocol):
    """The rules of one layout: a module with these two functions."""

    def recognises(self, names: frozenset[str], /) -> bool:
        """Whether a checkpoint of these files has this layout."""
        ...

    def plan(self, checkpoint: OpenedCheckpoint, /) -> Plan:
        """Where every tensor lies."""
        ...


LAYOUTS: tuple[Layout, ...] = (zero12, replicated)

_FOREIGN_FOLDERS = {"zero": "a universal checkpoint", "offloaded_tensors": "an optimizer offloaded to NVMe"}
_FOREIGN_FILES = {
    r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt": "ZeRO 3",
    r"(layer_-?\d+_)?expert_\d+_.*|expp_rank_.*": "a mixture of experts",
    r"layer_\d+-.*model_states\.pt": "a pipeline",
    r"(bf16_)?(zero_pp_rank_\d+_)?mp_rank_(?!00_).*": "tensor or pipeline parallelism",
}


def layout_of(checkpoint: OpenedCheckpoint) -> Layout:
    """The layout of a checkpoint; UnknownLayout says what was seen instead."""
    seen = [what for name, what in _FOREIGN_FOLDERS.items() if (checkpoint.folder / name).is_dir()]
    seen += [
        what
        for pattern, what in _FOREIGN_FILES.items()
        if any(re.fullmatch(pattern, name) for name in checkpoint.names)
    ]
    known = [layout for layout in LAYOUTS if layout.recognises(checkpoint.names)]
    if seen or not known:
        raise UnknownLayout(
            f"{checkpoint.folder} looks like {' and '.join(seen) or 'no checkpoint of DeepSpeed'} "
            f"({', '.join(sorted(checkpoint.names)[:6])}): dense checkpoints of ZeRO 0, 1 and 2 can be consolidated"
        )
    return known[0]
