"""Experts and pipelines on four ranks, so that every kind of rank group has several ranks.

The experts are split over two ranks, with two replicas. One pipeline has two stages and two replicas; another one has
four stages.
"""

from pathlib import Path
from typing import Any

import pytest

from t5train.checkpoint.sidecar import read_all
from t5train.records.stage_records import TokenShards
from tests.support.training.launched import Trained, spec_of, train

pytestmark = pytest.mark.slow
EXPERTS = "zero2-fp32-ep2"
LAYOUTS = [EXPERTS, "zero1-fp32-pp2-tied", "zero1-bf16-pp4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """Each layout trained without interruption, and killed and resumed, all in one launch."""
    root = tmp_path_factory.mktemp("four")
    jobs: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        runs: list[dict[str, Any]] = [
            {"name": f"{layout}.whole", "run_folder": f"{root}/{layout}.whole"},
            {"name": f"{layout}.killed", "run_folder": f"{root}/{layout}.killed", "stop_at": 3},
            {"name": f"{layout}.resumed", "run_folder": f"{root}/{layout}.killed", "resume_tag": "step-00000002"},
        ]
        for run in runs:
            run["spec"] = spec_of(layout, ranks=4).model_dump(mode="json")
        jobs += runs
    return train(root, jobs, pydocs_shards, ranks=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_killed_between_checkpoints_resumes_bit_equal(trained: Trained, layout: str) -> None:
    assert trained.found(f"{layout}.killed")["error"] == "StopTraining"
    whole = trained.found(f"{layout}.whole")
    assert whole == trained.found(f"{layout}.resumed")
    assert all(trained.found(f"{layout}.whole", rank) == whole for rank in range(4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_consolidation_gives_the_live_masters_bit_for_bit(trained: Trained, layout: str, tmp_path: Path) -> None:
    assert trained.consolidated(f"{layout}.whole", tmp_path) == trained.found(f"{layout}.whole")["masters"]


def test_the_sidecars_of_a_pipeline_list_the_layers_that_each_rank_wrote(trained: Trained) -> None:
    sidecars = read_all(trained.root / "zero1-fp32-pp2-tied.whole/checkpoints/step-00000004")
    positions = [(one.layout.pipeline_rank, one.layout.data_parallel_rank) for one in sidecars]
    assert positions == [(0, 0), (0, 1), (1, 0), (1, 1)]
    layers = [{name for name in one.files if name.startswith("layer_")} for one in sidecars]
    assert "layer_00-model_states.pt" in layers[0]
    assert layers[2]
    assert layers[1] == layers[3] == set()
    held = [{slot.name for group in one.groups for slot in group} for one in sidecars]
    assert held[0] == held[1]
    assert {"shared.weight"} <= held[0] & held[2]


def test_the_sidecar_of_a_rank_lists_the_experts_that_it_wrote(trained: Trained) -> None:
    sidecars = read_all(trained.root / f"{EXPERTS}.whole/checkpoints/step-00000004")
    experts = [{int(name.split("_")[3]) for name in one.files if name.startswith("layer_")} for one in sidecars]
    assert experts == [{0, 1}, {2, 3}, set(), set()]
    held = [(one.layout.expert_rank, one.layout.expert_data_rank) for one in sidecars]
    assert held == [(0, 0), (1, 0), (0, 1), (1, 1)]
    slots = {slot.name for group in sidecars[3].groups for slot in group}
    assert "encoder.block.1.layer.1.mlp.experts.expert_2.wi.weight" in slots
    assert "encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight" not in slots
