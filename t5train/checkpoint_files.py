"""Which rank wrote each of DeepSpeed's files of a checkpoint, told by its name, and which read it when they resume.

On hosts that share no disk a file lies where it was written, and that is not always where it is read.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from t5train.errors import IncompleteCheckpoint
from t5train.sidecar import Sidecar

_PARTITION = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_")
_EXPERT = re.compile(r"layer_\d+_expert_(\d+)_mp_rank_\d+_")
_LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
_STAGE = re.compile(r"mp_rank_(\d+)_")


@dataclass(frozen=True)
class Writers:
    """Who answers for each file; a model that is no pipeline has one stage, of all ranks."""

    ranks_a_stage: int
    experts_a_rank: int = 0
    stage_of_layer: Callable[[int], int] | None = None

    def of(self, name: str) -> int:
        """The rank that wrote a file of this name; where several did or could, the first."""
        if match := _EXPERT.search(name):
            return int(match[1]) // self.experts_a_rank
        if self.stage_of_layer and (match := _LAYER.match(name)):
            return self.stage_of_layer(int(match[1])) * self.ranks_a_stage
        stage, partition = _STAGE.search(name), _PARTITION.search(name)
        return int(stage[1] if stage else 0) * self.ranks_a_stage + int(partition[1] if partition else 0)


def files_read_by(rank: int, sidecars: Sequence[Sidecar]) -> list[str]:
    """Names of the files that must lie on the node of ``rank`` for DeepSpeed to resume there, sorted.

    ``sidecars`` are those of all ranks of the checkpoint. Raises IncompleteCheckpoint when that of ``rank`` is missing.
    """
    own = next((one for one in sidecars if one.rank == rank), None)
    if own is None:
        raise IncompleteCheckpoint(f"rank {rank} has no sidecar among the {len(sidecars)} at hand: gather them first")
    return sorted(name for writer in sidecars for name in writer.files if _reads(own, writer, name))


def _reads(reader: Sidecar, writer: Sidecar, name: str) -> bool:
    if _PARTITION.search(name):
        return reader.rank == writer.rank
    if _EXPERT.match(name):
        return reader.layout.expert_rank == writer.layout.expert_rank
    if _LAYER.match(name):
        return reader.layout.pipeline_rank == writer.layout.pipeline_rank
    # Of what stages say of themselves DeepSpeed opens the first and the reader's, and counts them: all must be there.
    return True
