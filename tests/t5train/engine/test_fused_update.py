"""The fused update in DeepSpeed's engine, on real ranks, next to DeepSpeed's own update of the same step."""

import json
from pathlib import Path
from typing import Any

import pytest

from t5train.errors import SpecError
from t5train.records.stage_records import TokenShards
from tests.support.training.launched import Trained, launch, spec_of

pytest.importorskip("triton", reason="Triton is not installed; `make test` does it")
pytestmark = pytest.mark.slow

BOUND, ROUNDED_BOUND = 1e-6, 1e-4
"""Largest relative distances of fp32 tensors and of the bf16 weights, of which a few are rounded the other way."""
PASSES = {"layout.micro_batch_sequences": 8}  # one pass a step: gradients stay in bf16
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("zero1-bf16", PASSES),
    "zero1, two passes a step": ("zero1-bf16", {}),
    "zero2": ("zero2-bf16", PASSES),
    "zero2, two passes a step": ("zero2-bf16", {}),
    "experts on every rank": ("zero2-bf16-ep1", PASSES),
    "experts divided": ("zero2-bf16-ep2", PASSES),
    "two experts a token": ("zero1-bf16-ep2-top2", PASSES),
    "pipeline": ("zero1-bf16-pp2", {}),
    "pipeline with tied weights": ("zero1-bf16-pp2-tied", {}),
    "unclipped, with weight decay": (
        "zero2-bf16",
        {"optimizer.gradient_clip": 0.0, "optimizer.weight_decay": 0.1},
    ),
    "plain AdamW": ("zero2-bf16", {"optimizer.kind": "adamw"}),
}


ON_ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {  # without DeepSpeed's buckets
    "zero1 alone": ("zero1-bf16", PASSES),
    "zero1 alone, two passes a step": ("zero1-bf16", {}),
    "zero2 alone": ("zero2-bf16", PASSES),
    "zero2 alone, two passes a step": ("zero2-bf16", {}),
    "experts alone, two passes a step": ("zero2-bf16-ep1", {}),
}


def _launch(root: Path, shards: TokenShards, layouts: dict[str, tuple[str, dict[str, Any]]], ranks: int) -> Path:
    jobs = [
        {
            "name": name,
            "spec": spec_of(layout, ranks=ranks)
            .with_settings({"model.dropout_rate": 0.0, **settings})
            .model_dump(mode="json"),
            "run_folder": str(root / name),
            "shards": str(shards.path),
        }
        for name, (layout, settings) in layouts.items()
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    launch(root / "jobs.json", ranks, program="update_program")
    return root


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Path:
    return _launch(tmp_path_factory.mktemp("two"), pydocs_shards, LAYOUTS, ranks=2)


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Path:
    return _launch(tmp_path_factory.mktemp("one"), pydocs_shards, ON_ONE_RANK, ranks=1)


def _require_small(report: Path) -> None:
    found = json.loads(report.read_text())
    rounded = found.pop("the model's weights")
    assert len(found) >= 5
    assert max(found.values()) <= BOUND, found
    assert rounded <= ROUNDED_BOUND


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_equals_that_of_deepspeeds_update(of_two_ranks: Path, name: str, rank: int) -> None:
    _require_small(of_two_ranks / f"{name}.rank-{rank}.json")


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_a_step_of_one_rank_without_buckets_equals_that_of_deepspeeds_update(of_one_rank: Path, name: str) -> None:
    _require_small(of_one_rank / f"{name}.rank-0.json")


RESUMED = ["zero2-bf16", "zero2-bf16-ep2", "zero1-bf16-pp2-tied"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """Runs with the fused update: to the end, and killed and resumed; and one whose gradients become NaN."""
    root = tmp_path_factory.mktemp("trained")
    jobs: list[dict[str, Any]] = []
    for layout in RESUMED:
        folders = {name: str(root / f"{layout}.{name}") for name in ("whole", "killed")}
        jobs += [
            {"name": f"{layout}.whole", "layout": layout, "run_folder": folders["whole"]},
            {"name": f"{layout}.killed", "layout": layout, "run_folder": folders["killed"], "stop_at": 3},
            {
                "name": f"{layout}.resumed",
                "layout": layout,
                "run_folder": folders["killed"],
                "resume_tag": "step-00000002",
            },
        ]
    jobs.append({"name": "nan", "layout": "zero2-bf16", "run_folder": str(root / "nan"), "fault": "nan-gradients"})
    for job in jobs:
        Path(job["run_folder"]).mkdir(exist_ok=True)
        job["spec"] = spec_of(job.pop("layout")).model_dump(mode="json")
        job |= {"shards": str(pydocs_shards.path), "is_fused": True}
    (root / "jobs.json").write_text(json.dumps(jobs))
    launch(root / "jobs.json")
    return Trained(root)


@pytest.mark.parametrize("layout", RESUMED)
def test_a_killed_run_resumes_bit_equal(trained: Trained, layout: str, tmp_path: Path) -> None:
    assert trained.found(f"{layout}.killed")["error"] == "StopTraining"
    whole, resumed = trained.found(f"{layout}.whole"), trained.found(f"{layout}.resumed")
    assert whole["step"] == resumed["step"] == 4
    assert whole["masters"] == resumed["masters"]
    assert trained.consolidated(f"{layout}.whole", tmp_path) == whole["masters"]


def test_gradients_that_are_not_finite_end_the_run(trained: Trained) -> None:
    found = trained.found("nan")
    assert found["error"] == "NonFiniteLoss"
    assert "the gradient norm is nan at step 3" in found["message"]


def test_another_version_of_deepspeed_is_refused() -> None:
    from t5train.engine.fused_update import CHECKED_WITH, require_checked_version

    require_checked_version(CHECKED_WITH)
    with pytest.raises(SpecError, match=r"replaces methods of DeepSpeed 0\.19\.8, but 0\.20\.0 is installed"):
        require_checked_version("0.20.0")
