"""The fused update in DeepSpeed's engine, on real ranks, next to DeepSpeed's own update of the same step."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import SpecError
from t5train.records.stage_records import TokenShards
from tests.support.needed_triton import require_triton
from tests.support.training.launched import Trained, spec_of, train

require_triton()
pytestmark = pytest.mark.slow

BOUND, ROUNDED_BOUND = 1e-6, 1e-4
"""Largest relative distances of fp32 tensors and of the bf16 weights, of which a few are rounded the other way."""
RESUMED_BOUND = 1e-4
"""The same after three steps, of which DeepSpeed took two: gradients of weights rounded the other way differ, too."""
PASSES = {"layout.micro_batch_sequences": 8}  # one pass a step: gradients stay in bf16
DECAYED = {"optimizer.weight_decay": 0.1}
Cases = dict[str, tuple[str, dict[str, Any]]]
COMPARED: dict[int, Cases] = {
    2: {
        "zero1, two passes a step": ("zero1-bf16", {}),
        "zero2": ("zero2-bf16", PASSES),
        "experts on every rank": ("zero2-bf16-ep1", PASSES),
        "experts divided, with weight decay": ("zero2-bf16-ep2", PASSES | DECAYED),
        "two experts a token": ("zero1-bf16-ep2-top2", PASSES),
        "pipeline": ("zero1-bf16-pp2", {}),
        "pipeline with tied weights and weight decay": ("zero1-bf16-pp2-tied", DECAYED),
        "unclipped, with weight decay": ("zero2-bf16", {"optimizer.gradient_clip": 0.0} | DECAYED),
        "plain AdamW": ("zero2-bf16", {"optimizer.kind": "adamw"}),
        "zero3, with weight decay": ("zero3-bf16", DECAYED),
    },
    1: {  # without DeepSpeed's buckets
        "zero1 alone, two passes a step": ("zero1-bf16", {}),
        "zero2 alone": ("zero2-bf16", PASSES),
        "experts alone, two passes a step": ("zero2-bf16-ep1", {}),
    },
}
"""By the number of ranks."""
POISONED: dict[int, Cases] = {
    2: {
        "experts with NaN": ("zero2-bf16-ep2", PASSES | {"poison": "nan"}),
        "experts with infinity": ("zero1-bf16-ep2", {"poison": "inf"}),
        "pipeline with NaN": ("zero1-bf16-pp2-tied", {"poison": "nan"}),
    },
    1: {
        "zero2 alone with NaN": ("zero2-bf16", PASSES | {"poison": "nan"}),
        "zero1 alone with infinity, two passes a step": ("zero1-bf16", {"poison": "inf"}),
    },
}
RESUMED = {2: ["zero2-bf16", "zero2-bf16-ep2", "zero1-bf16-pp2-tied", "zero3-bf16"], 1: ["zero1-bf16"]}
TAG = {"resume_tag": "step-00000002"}


def _spec_of(layout: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A model with few parameters, as interpreted kernels take most of the time. Experts begin in the second layer."""
    shallow = {} if "-ep" in layout else {"model.num_layers": 1}
    return spec_of(layout, num_steps=3, ranks=ranks).with_settings(shallow | settings).model_dump(mode="json")


def _by_ranks(cases: Mapping[int, Iterable[str]]) -> list[tuple[int, str]]:
    return [(ranks, name) for ranks, names in cases.items() for name in names]


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards
) -> Callable[[int, str], list[dict[str, float]]]:
    """``reports(ranks, name)`` is what every rank reports of a case; all cases of so many ranks are one launch."""

    @cache
    def launched(ranks: int) -> Path:
        root = tmp_path_factory.mktemp("steps")
        jobs = []
        for name, (layout, settings) in (COMPARED[ranks] | POISONED[ranks]).items():
            more = {key: value for key, value in settings.items() if key == "poison"}
            given = {"model.dropout_rate": 0.0} | {key: settings[key] for key in settings.keys() - more}
            jobs.append({"name": name, "spec": _spec_of(layout, ranks, given), **more})
        train(root, jobs, pydocs_shards, ranks, program="update_program")
        return root

    return lambda ranks, name: [
        json.loads((launched(ranks) / f"{name}.rank-{rank}.json").read_text()) for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "name"), _by_ranks(COMPARED))
def test_a_step_equals_that_of_deepspeeds_update(
    reports: Callable[[int, str], list[dict[str, float]]], ranks: int, name: str
) -> None:
    for found in reports(ranks, name):
        rounded = found.pop("the model's weights")
        assert len(found) >= 5
        assert max(found.values()) <= BOUND, found
        assert rounded <= ROUNDED_BOUND


@pytest.mark.parametrize(("ranks", "name"), _by_ranks(POISONED))
def test_gradients_that_are_not_finite_on_one_rank_change_nothing_on_any(
    reports: Callable[[int, str], list[dict[str, float]]], ranks: int, name: str
) -> None:
    for found in reports(ranks, name):
        assert {"weights 0", "first moments 0", "second moments 0", "the model's weights"} <= found.keys()
        assert set(found.values()) == {0.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Callable[[int], Trained]:
    """Runs of so many ranks with the fused update: to the end, and killed after step 2 and resumed.

    Of two ranks, also one whose gradients become NaN, and ``before``, whose updates are fused only once it is resumed.
    """

    @cache
    def launched(ranks: int) -> Trained:
        root = tmp_path_factory.mktemp("trained")
        jobs: list[dict[str, Any]] = []
        for layout in RESUMED[ranks]:
            killed = {"killed": f"{root}/{layout}.whole", **TAG}
            jobs += [{"name": f"{layout}.whole", "layout": layout}, {"name": f"{layout}.resumed", "layout": layout}]
            jobs[-1] |= killed
        if ranks == 2:
            before = {"layout": "zero2-bf16", "run_folder": f"{root}/before"}
            jobs.append({**before, "name": "before.killed", "stop_at": 2, "is_fused": False})
            jobs.append({**before, "name": "before.resumed", **TAG})
            jobs.append({"name": "nan", "layout": "zero2-bf16", "fault": "nan-gradients"})
        for job in jobs:
            job["spec"] = _spec_of(job.pop("layout"), ranks, {})
            job.setdefault("is_fused", True)
        return train(root, jobs, pydocs_shards, ranks)

    return launched


@pytest.mark.parametrize(("ranks", "layout"), _by_ranks(RESUMED))
def test_a_killed_run_resumes_bit_equal(
    trained: Callable[[int], Trained], ranks: int, layout: str, tmp_path: Path
) -> None:
    results = trained(ranks)
    whole, resumed = results.found(f"{layout}.whole"), results.found(f"{layout}.resumed")
    assert whole["step"] == resumed["step"] == 3
    assert whole["masters"] == resumed["masters"]
    assert results.consolidated(f"{layout}.whole", tmp_path) == whole["masters"]


def test_a_run_that_deepspeed_has_updated_goes_on_with_the_fused_update(
    trained: Callable[[int], Trained], tmp_path: Path
) -> None:
    """Its last bits then differ from those of a run that was fused from the start."""
    results = trained(2)
    whole, resumed = results.found("zero2-bf16.whole"), results.found("before.resumed")
    assert results.found("before.killed")["error"] == "StopTraining"
    assert resumed["step"] == 3
    tensors = [_weights(results.root / name, tmp_path) for name in ("before", "zero2-bf16.whole")]
    assert whole["masters"].keys() == tensors[0].keys() == tensors[1].keys()
    found, expected = (torch.cat([each[name].flatten() for name in sorted(each)]) for each in tensors)
    assert 0 < float((found - expected).norm() / expected.norm()) <= RESUMED_BOUND


def _weights(run: Path, into: Path) -> dict[str, torch.Tensor]:
    consolidate(run / "checkpoints", into / run.name)
    return load_file(into / run.name / "model.safetensors")


def test_gradients_that_are_not_finite_end_the_run(trained: Callable[[int], Trained]) -> None:
    found = trained(2).found("nan")
    assert found["error"] == "NonFiniteLoss"
    assert "the gradient norm is nan at step 3" in found["message"]


def test_another_version_of_deepspeed_is_refused() -> None:
    from t5train.engine.fused_update import CHECKED_WITH, require_checked_version

    require_checked_version(CHECKED_WITH)
    with pytest.raises(SpecError, match=r"replaces methods of DeepSpeed 0\.19\.8, but 0\.20\.0 is installed"):
        require_checked_version("0.20.0")
