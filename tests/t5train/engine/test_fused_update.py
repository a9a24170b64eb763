"""The fused update in DeepSpeed's engine, on real ranks, next to DeepSpeed's own update of the same step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import SpecError
from t5train.records.stage_records import TokenShards
from tests.support.needed_triton import require_triton
from tests.support.training.launched import Trained, launch, spec_of, train

require_triton()
pytestmark = pytest.mark.slow

BOUND, ROUNDED_BOUND = 1e-6, 1e-4
"""Largest relative distances of fp32 tensors and of the bf16 weights, of which a few are rounded the other way."""
RESUMED_BOUND = 1e-4
"""The same after four steps, of which DeepSpeed took two: gradients of weights rounded the other way differ, too."""
PASSES = {"layout.micro_batch_sequences": 8}  # one pass a step: gradients stay in bf16
DECAYED = {"optimizer.weight_decay": 0.1}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("zero1-bf16", PASSES),
    "zero1, two passes a step": ("zero1-bf16", {}),
    "zero2": ("zero2-bf16", PASSES),
    "zero2, two passes a step": ("zero2-bf16", {}),
    "experts on every rank": ("zero2-bf16-ep1", PASSES),
    "experts divided, with weight decay": ("zero2-bf16-ep2", PASSES | DECAYED),
    "two experts a token": ("zero1-bf16-ep2-top2", PASSES),
    "pipeline": ("zero1-bf16-pp2", {}),
    "pipeline with tied weights and weight decay": ("zero1-bf16-pp2-tied", DECAYED),
    "unclipped, with weight decay": ("zero2-bf16", {"optimizer.gradient_clip": 0.0} | DECAYED),
    "plain AdamW": ("zero2-bf16", {"optimizer.kind": "adamw"}),
    "zero3, with weight decay": ("zero3-bf16", DECAYED),
}
POISONED: dict[str, tuple[str, dict[str, Any]]] = {
    "experts with NaN": ("zero2-bf16-ep2", PASSES | {"poison": "nan"}),
    "experts with infinity": ("zero1-bf16-ep2", {"poison": "inf"}),
    "pipeline with NaN": ("zero1-bf16-pp2-tied", {"poison": "nan"}),
}


ON_ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {  # without DeepSpeed's buckets
    "zero1 alone": ("zero1-bf16", PASSES),
    "zero1 alone, two passes a step": ("zero1-bf16", {}),
    "zero2 alone": ("zero2-bf16", PASSES),
    "zero2 alone, two passes a step": ("zero2-bf16", {}),
    "experts alone, two passes a step": ("zero2-bf16-ep1", {}),
}
POISONED_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2 alone with NaN": ("zero2-bf16", PASSES | {"poison": "nan"}),
    "zero1 alone with infinity, two passes a step": ("zero1-bf16", {"poison": "inf"}),
}


def _launch(root: Path, shards: TokenShards, layouts: dict[str, tuple[str, dict[str, Any]]], ranks: int) -> Path:
    jobs = [
        {
            "name": name,
            "spec": spec_of(layout, ranks=ranks)
            .with_settings({"model.dropout_rate": 0.0, **{key: settings[key] for key in settings if key != "poison"}})
            .model_dump(mode="json"),
            **({"poison": settings["poison"]} if "poison" in settings else {}),
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
    return _launch(tmp_path_factory.mktemp("two"), pydocs_shards, LAYOUTS | POISONED, ranks=2)


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Path:
    return _launch(tmp_path_factory.mktemp("one"), pydocs_shards, ON_ONE_RANK | POISONED_ALONE, ranks=1)


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


@pytest.mark.parametrize("name", POISONED)
@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_are_not_finite_on_one_rank_change_nothing_on_any(
    of_two_ranks: Path, name: str, rank: int
) -> None:
    _require_unchanged(of_two_ranks / f"{name}.rank-{rank}.json")


@pytest.mark.parametrize("name", POISONED_ALONE)
def test_gradients_that_are_not_finite_change_nothing_on_one_rank(of_one_rank: Path, name: str) -> None:
    _require_unchanged(of_one_rank / f"{name}.rank-0.json")


def _require_unchanged(report: Path) -> None:
    found = json.loads(report.read_text())
    assert {"weights 0", "first moments 0", "second moments 0", "the model's weights"} <= found.keys()
    assert set(found.values()) == {0.0}


RESUMED = ["zero1-bf16", "zero2-bf16", "zero2-bf16-ep2", "zero1-bf16-pp2-tied", "zero3-bf16"]
RESUMED_ALONE = ["zero1-bf16", "zero2-bf16"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """Runs with the fused update: to the end, and killed and resumed; and one whose gradients become NaN.

    The run ``before`` was killed before its updates were fused.
    """
    root = tmp_path_factory.mktemp("trained")
    jobs = _killed_and_resumed(root, RESUMED)
    killed = {"name": "before.killed", "layout": "zero2-bf16", "run_folder": str(root / "before"), "stop_at": 3}
    jobs.append(killed | {"is_fused": False})
    jobs.append({**killed, "name": "before.resumed", "stop_at": 9, "resume_tag": "step-00000002"})
    jobs.append({"name": "nan", "layout": "zero2-bf16", "run_folder": str(root / "nan"), "fault": "nan-gradients"})
    return _train(root, jobs, pydocs_shards, ranks=2)


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    root = tmp_path_factory.mktemp("alone")
    return _train(root, _killed_and_resumed(root, RESUMED_ALONE), pydocs_shards, ranks=1)


def _killed_and_resumed(root: Path, layouts: list[str]) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for layout in layouts:
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
    return jobs


def _train(root: Path, jobs: list[dict[str, Any]], shards: TokenShards, ranks: int) -> Trained:
    for job in jobs:
        job["spec"] = spec_of(job.pop("layout"), ranks=ranks).model_dump(mode="json")
        job.setdefault("is_fused", True)
    return train(root, jobs, shards, ranks)


@pytest.mark.parametrize("layout", RESUMED)
def test_a_killed_run_resumes_bit_equal(trained: Trained, layout: str, tmp_path: Path) -> None:
    _require_resumed(trained, layout, tmp_path)


@pytest.mark.parametrize("layout", RESUMED_ALONE)
def test_a_killed_run_of_one_rank_resumes_bit_equal(trained_alone: Trained, layout: str, tmp_path: Path) -> None:
    _require_resumed(trained_alone, layout, tmp_path)


def _require_resumed(trained: Trained, layout: str, tmp_path: Path) -> None:
    assert trained.found(f"{layout}.killed")["error"] == "StopTraining"
    whole, resumed = trained.found(f"{layout}.whole"), trained.found(f"{layout}.resumed")
    assert whole["step"] == resumed["step"] == 4
    assert whole["masters"] == resumed["masters"]
    assert trained.consolidated(f"{layout}.whole", tmp_path) == whole["masters"]


def test_a_run_that_deepspeed_has_updated_goes_on_with_the_fused_update(trained: Trained, tmp_path: Path) -> None:
    """Its last bits then differ from those of a run that was fused from the start."""
    whole, resumed = trained.found("zero2-bf16.whole"), trained.found("before.resumed")
    assert resumed["step"] == 4
    tensors = [_weights(trained.root / name, tmp_path) for name in ("before", "zero2-bf16.whole")]
    assert whole["masters"].keys() == tensors[0].keys() == tensors[1].keys()
    found, expected = (torch.cat([each[name].flatten() for name in sorted(each)]) for each in tensors)
    assert 0 < float((found - expected).norm() / expected.norm()) <= RESUMED_BOUND


def _weights(run: Path, into: Path) -> dict[str, torch.Tensor]:
    consolidate(run / "checkpoints", into / run.name)
    return load_file(into / run.name / "model.safetensors")


def test_gradients_that_are_not_finite_end_the_run(trained: Trained) -> None:
    found = trained.found("nan")
    assert found["error"] == "NonFiniteLoss"
    assert "the gradient norm is nan at step 3" in found["message"]


def test_another_version_of_deepspeed_is_refused() -> None:
    from t5train.engine.fused_update import CHECKED_WITH, require_checked_version

    require_checked_version(CHECKED_WITH)
    with pytest.raises(SpecError, match=r"replaces methods of DeepSpeed 0\.19\.8, but 0\.20\.0 is installed"):
        require_checked_version("0.20.0")
