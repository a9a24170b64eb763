"""Experts on four ranks: two share-outs of them, each held twice, so that every kind of rank group has several."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from t5train.consolidate import consolidate
from t5train.records import TokenShards
from t5train.sidecar import read_all
from t5train.train.ranks import digest64
from tests.t5train.train.test_training import Trained, _launch, _spec

pytestmark = pytest.mark.slow
LAYOUT = "zero2-fp32-ep2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """The same run whole, and killed and resumed, in one launch."""
    root = tmp_path_factory.mktemp("four")
    spec = _spec(LAYOUT, ranks=4).model_dump(mode="json")
    jobs: list[dict[str, Any]] = [
        {"name": "whole", "run_folder": f"{root}/whole"},
        {"name": "killed", "run_folder": f"{root}/killed", "stop_at": 5},
        {"name": "resumed", "run_folder": f"{root}/killed", "resume_tag": "step-00000003"},
    ]
    for job in jobs:
        Path(job["run_folder"]).mkdir(exist_ok=True)
        job |= {"spec": spec, "shards": str(pydocs_shards.path)}
    (root / "jobs.json").write_text(json.dumps(jobs))
    _launch(root / "jobs.json", ranks=4)
    return Trained(root)


def test_a_run_cut_off_between_checkpoints_resumes_bit_equal(trained: Trained) -> None:
    assert trained.found("killed")["error"] == "StopTraining"
    assert trained.found("whole") == trained.found("resumed")
    assert all(trained.found("whole", rank) == trained.found("whole") for rank in range(4))


def test_consolidation_gives_the_live_masters_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    consolidate(trained.root / "whole/checkpoints", tmp_path / "weights")
    tensors = load_file(tmp_path / "weights/model.safetensors")
    digests = {name: digest64(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    assert digests == trained.found("whole")["masters"]


def test_a_rank_vouches_for_the_experts_that_it_wrote(trained: Trained) -> None:
    sidecars = read_all(trained.root / "whole/checkpoints/step-00000006")
    experts = [{int(name.split("_")[3]) for name in one.files if name.startswith("layer_")} for one in sidecars]
    assert experts == [{0, 1}, {2, 3}, set(), set()]
    held = [(one.layout.expert_rank, one.layout.expert_data_rank) for one in sidecars]
    assert held == [(0, 0), (1, 0), (0, 1), (1, 1)]
    slots = {slot.name for group in sidecars[3].groups for slot in group}
    assert "encoder.block.1.layer.1.mlp.experts.expert_2.wi.weight" in slots
    assert "encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight" not in slots
