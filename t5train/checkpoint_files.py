"""Which ranks read which of DeepSpeed's files when they resume, told by the files' names and the ranks' sidecars.

On hosts that share no disk a file lies where it was written, and that is not always where it is read.
"""

import re
from collections.abc import Sequence

from t5train.errors import IncompleteCheckpoint
from t5train.sidecar import Sidecar

PARTITION = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_")
"""One rank's part of the optimizer, and at ZeRO 3 of the model."""

EXPERT = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_")
"""The weights of one expert of a layer."""

LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
"""The weights of one layer of a pipeline."""

STAGE = re.compile(r"mp_rank_(\d+)_")
"""What belongs to all ranks, or in a pipeline to those of one stage."""


def files_read_by(rank: int, sidecars: Sequence[Sidecar]) -> list[str]:
    """Names of the files that must lie on the node of ``rank`` for DeepSpeed to resume there, sorted.

    ``sidecars`` are those of all ranks of the checkpoint. Raises IncompleteCheckpoint when that of ``rank`` is missing.
    """
    own = next((one for one in sidecars if one.rank == rank), None)
    if own is None:
        raise IncompleteCheckpoint(f"rank {rank} has no sidecar among the {len(sidecars)} at hand: gather them first")
    return sorted(name for writer in sidecars for name in writer.files if _reads(own, writer, name))


def _reads(reader: Sidecar, writer: Sidecar, name: str) -> bool:
    if PARTITION.search(name):
        return reader.rank == writer.rank
    if EXPERT.match(name):
        return reader.layout.expert_rank == writer.layout.expert_rank
    if LAYER.match(name):
        return reader.layout.pipeline_rank == writer.layout.pipeline_rank
    # DeepSpeed opens the first it finds, and wants one of every stage to be there.
    return True
