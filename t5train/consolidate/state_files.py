"""The files of a checkpoint by what they hold, as their names tell.

``mp_rank_00`` is the whole model but for pipelines, where each stage has a number, and tensor parallelism.
"""

import re
from collections.abc import Iterable
from enum import Enum


class StateFile(Enum):
    """What a file holds; the text says what a checkpoint with such files looks like."""

    MODEL = "model states in one file"
    RANK_MODEL = "model states of each rank (ZeRO 3)"
    OPTIMIZER = "optimizer states of each data-parallel rank"
    LAYER = "a pipeline"
    EXPERT = "a mixture of experts"
    EXPERT_OPTIMIZER = "a mixture of experts (ZeRO 0)"
    OTHER_MODEL = "tensor or pipeline parallelism"
    OTHER_RANK_MODEL = "tensor or pipeline parallelism (ZeRO 3)"
    OTHER_OPTIMIZER = "tensor or pipeline parallelism (optimizer states)"


_PATTERNS = {
    StateFile.MODEL: r"mp_rank_00_model_states\.pt",
    StateFile.RANK_MODEL: r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt",
    StateFile.OPTIMIZER: r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt",
    StateFile.LAYER: r"layer_(\d+)-model_states\.pt",
    StateFile.EXPERT: r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt",
    StateFile.EXPERT_OPTIMIZER: r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt",
    StateFile.OTHER_MODEL: r"mp_rank_(\d+)_model_states\.pt",
    StateFile.OTHER_RANK_MODEL: r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt",
    StateFile.OTHER_OPTIMIZER: r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt",
}


def kind_of(name: str) -> StateFile | None:
    """The first kind whose pattern is that of the name."""
    return next((kind for kind, pattern in _PATTERNS.items() if re.fullmatch(pattern, name)), None)


def numbered(names: Iterable[str], kind: StateFile) -> list[tuple[tuple[int, ...], str]]:
    """The files of one kind with the numbers in their names (ranks, layers, experts), in the numbers' order."""
    found = [(tuple(map(int, match.groups())), match[0]) for name in names if (match := _match(kind, name))]
    return sorted(found)


def _match(kind: StateFile, name: str) -> re.Match[str] | None:
    return re.fullmatch(_PATTERNS[kind], name) if kind_of(name) is kind else None
