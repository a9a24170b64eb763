"""A checkpoint that is written while real ranks train on: its files, and what ends or delays it."""

import json
from pathlib import Path
from typing import Any

import pytest

from t5train.checkpoint.sidecar import is_sidecar
from t5train.checkpoint.tags import require_complete
from t5train.files.run_folder import LAST_COMPLETE
from t5train.records.metrics import read
from t5train.records.stage_records import TokenShards
from tests.support.training.launched import Trained, job, train

pytestmark = pytest.mark.slow

LAYOUTS = ["zero0-fp32", "zero1-bf16-offload", "zero3-bf16", "zero2-fp32-ep2", "zero1-bf16-pp2-tied"]
TAG = "step-00000002"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """Each layout twice: with copies, and without the memory for them. All in one launch of two ranks."""
    jobs: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        jobs += [job(f"{layout}.copied", layout), job(f"{layout}.direct", layout, fault="short-memory")]
    jobs.append(job("stopped", "zero1-fp32", sigterm_at=3))
    jobs.append(job("slow", "zero1-fp32", rank_1_waits=True))
    return train(tmp_path_factory.mktemp("trained"), jobs, pydocs_shards)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_written_after_the_next_step_have_the_bytes_of_files_that_training_waited_for(
    trained: Trained, layout: str
) -> None:
    assert trained.found(f"{layout}.copied")["late"] == [2]
    assert trained.found(f"{layout}.direct")["late"] == []
    copied, direct = (trained.root / f"{layout}.{how}" / "checkpoints" / TAG for how in ("copied", "direct"))
    require_complete(copied)
    names = sorted(path.name for path in direct.iterdir())
    assert sorted(path.name for path in copied.iterdir()) == names
    for name in names:
        if is_sidecar(name):  # a value of its own distinguishes each save
            assert _without(copied / name) == _without(direct / name)
        else:
            assert (copied / name).read_bytes() == (direct / name).read_bytes(), name


def _without(sidecar: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(sidecar.read_bytes())
    return {name: value for name, value in document.items() if name not in {"saving", "sha256"}}


def test_an_ordered_save_waits_for_the_one_that_is_running(trained: Trained) -> None:
    assert trained.found("stopped")["error"] == "Preempted"
    for tag in (TAG, "step-00000003"):
        require_complete(trained.root / "stopped" / "checkpoints" / tag)
    assert json.loads((trained.root / "stopped" / LAST_COMPLETE).read_text())["tag"] == "step-00000003"


def test_a_checkpoint_is_recorded_only_when_the_slowest_rank_has_written_its_part(trained: Trained) -> None:
    assert [trained.found("slow", rank)["late"] for rank in (0, 1)] == [[2], []]
    assert json.loads((trained.root / "slow" / LAST_COMPLETE).read_text())["tag"] == "step-00000004"


def test_the_time_that_training_waited_is_reported_for_each_checkpoint(trained: Trained) -> None:
    lines = read(trained.root / "zero0-fp32.copied" / "metrics.jsonl")
    assert [line["step"] for line in lines if "save_seconds" in line] == [2, 4]
