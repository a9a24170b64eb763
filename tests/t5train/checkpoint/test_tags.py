"""Which files a rank's node must have. train/test_node_local.py traces the files that DeepSpeed actually opens."""

from pathlib import Path

import pytest

from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import Sidecar
from t5train.checkpoint.tags import files_read_by
from t5train.errors import IncompleteCheckpoint
from t5train.records.digests import FileDigest
from tests.support.checkpoints.small_tags import save

ORIGINAL = FileDigest(sha256="a" * 64, size=1)


def _sidecars(folder: Path, wrote: list[list[str]], **positions: list[int]) -> list[Sidecar]:
    """A sidecar for each rank, with the files it wrote and its positions in the layout."""
    saved = sidecar.read_all(save(folder, 400, ranks=len(wrote)))
    return [
        one.model_copy(
            update={
                "files": dict.fromkeys(names, ORIGINAL),
                "layout": one.layout.model_copy(update={key: ranks[one.rank] for key, ranks in positions.items()}),
            }
        )
        for one, names in zip(saved, wrote, strict=True)
    ]


def test_a_rank_reads_its_own_files_and_those_shared_by_all_ranks(tmp_path: Path) -> None:
    parts = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    found = _sidecars(tmp_path, [["mp_rank_00_model_states.pt", parts[0]], [parts[1]]])
    assert files_read_by(0, found) == [parts[0], "mp_rank_00_model_states.pt"]
    assert files_read_by(1, found) == [parts[1], "mp_rank_00_model_states.pt"]


def test_ranks_with_the_same_experts_read_the_files_of_the_one_that_wrote_them(tmp_path: Path) -> None:
    experts = [f"layer_0_expert_{expert}_mp_rank_00_model_states.pt" for expert in (0, 1)]
    found = _sidecars(tmp_path, [[experts[0]], [experts[1]], [], []], expert_rank=[0, 1, 0, 1])
    assert [files_read_by(rank, found) for rank in range(4)] == [[experts[0]], [experts[1]]] * 2


def test_a_pipeline_stage_reads_its_own_layers_and_the_model_states_of_every_stage(tmp_path: Path) -> None:
    layers = [f"layer_0{layer}-model_states.pt" for layer in (0, 1)]
    stages = [f"mp_rank_0{stage}_model_states.pt" for stage in (0, 1)]
    wrote = [[layers[0], stages[0]], [], [layers[1], stages[1]], []]
    found = _sidecars(tmp_path, wrote, pipeline_rank=[0, 0, 1, 1])
    assert [files_read_by(rank, found) for rank in range(4)] == [[layer, *stages] for layer in layers for _ in "ab"]


def test_a_rank_without_a_sidecar_is_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match="rank 2 has no sidecar among the 2 found"):
        files_read_by(2, _sidecars(tmp_path, [[], []]))
