"""Passes of a pipeline that are recorded, on real ranks, next to those that DeepSpeed runs."""

import json
from pathlib import Path

import pytest

from t5train.records.stage_records import TokenShards
from tests.support.training.launched import launch, spec_of

pytestmark = pytest.mark.slow
RANKS = 2
LAYOUTS = ["zero1-bf16-pp2", "zero1-bf16-pp2-tied"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    jobs = [
        {
            "name": layout,
            "spec": spec_of(layout, ranks=RANKS).with_settings({"model.dropout_rate": 0.0}).model_dump(mode="json"),
            "run_folder": str(root / layout),
            "shards": str(pydocs_shards.path),
        }
        for layout in LAYOUTS
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    launch(root / "jobs.json", RANKS, program="recorded_program")
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_recorded_passes_train_the_same_bits(reports: Path, layout: str, rank: int) -> None:
    report = json.loads((reports / f"{layout}.rank-{rank}.json").read_text())
    assert report["different"] == []
    assert report["recorded"] == [2, 1][rank]  # as many as are under way at a time
