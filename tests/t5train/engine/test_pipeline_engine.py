"""Passes of a pipeline that are recorded, on real ranks, next to those that DeepSpeed runs."""

import pytest

from t5train.records.stage_records import TokenShards
from tests.support.training.launched import Trained, job, train

pytestmark = pytest.mark.slow
RANKS = 2
LAYOUTS = ["zero1-bf16-pp2", "zero1-bf16-pp2-tied"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    jobs = [job(layout, layout, {"model.dropout_rate": 0.0}, ranks=RANKS) for layout in LAYOUTS]
    return train(tmp_path_factory.mktemp("recorded"), jobs, pydocs_shards, RANKS, program="recorded_program")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_recorded_passes_train_the_same_bits(reports: Trained, layout: str, rank: int) -> None:
    report = reports.found(layout, rank)
    assert report["different"] == []
    assert report["recorded"] == [2, 1][rank]  # as many as are under way at a time
