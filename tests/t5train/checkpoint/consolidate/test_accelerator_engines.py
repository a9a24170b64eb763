"""Checkpoints of engines on accelerators, in the precisions used there, compared with the engines' own tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from t5train.checkpoint.consolidate import consolidate
from tests.support.checkpoints.live_tensors import joined, name_in_switch_transformers, require_live

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DENSE = [
    "zero0-fp16", "zero1-fp16", "zero2-fp16", "zero2-fp16-offload", "zero3-fp16", "zero3-fp16-offload",
    "zero2-fp16-untied", "zero3-fp16-untied", "zero1-bf16", "zero2-bf16", "zero3-bf16", "zero3-bf16-offload",
    "zero1-bf16-fp32-accumulation",
]  # fmt: skip
EXPERTS = ["zero0-fp16", "zero1-fp16", "zero2-fp16-every-expert-everywhere", "zero1-bf16"]
EXPERTS_ON_FOUR = ["zero2-fp16-split", "zero2-fp16-offload", "zero1-fp16-mixed-sizes", "zero2-bf16-split"]
PIPELINES = ["zero1-fp16", "zero1-bf16", "zero1-bf16-fp32-accumulation", "zero0-bf16"]
LaunchOnAccelerators = Callable[..., Path]


@pytest.fixture(scope="module")
def dense(launch_on_accelerators: LaunchOnAccelerators) -> Path:
    _require(2)
    return launch_on_accelerators("deepspeed_checkpoints", 2, *DENSE)


@pytest.fixture(scope="module")
def experts(launch_on_accelerators: LaunchOnAccelerators) -> Path:
    _require(2)
    ranks = 4 if torch.accelerator.device_count() >= 4 else 2
    return launch_on_accelerators(
        "deepspeed_moe_checkpoints", ranks, *EXPERTS, *(EXPERTS_ON_FOUR if ranks == 4 else ())
    )


@pytest.fixture(scope="module")
def pipelines(launch_on_accelerators: LaunchOnAccelerators) -> Path:
    _require(4)
    return launch_on_accelerators("deepspeed_pipeline_checkpoints", 4, *PIPELINES)


def _require(accelerators: int) -> None:
    if (found := torch.accelerator.device_count()) < accelerators:
        pytest.skip(f"needs {accelerators} accelerators, but this machine has {found}")


@pytest.mark.parametrize("layout", DENSE)
def test_consolidated_dense_checkpoints_equal_the_engines_masters_and_moments(
    dense: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(dense / "ours" / layout, tmp_path / "out", moments=True)
    require_live(tmp_path / "out", torch.load(dense / "live" / f"{layout}.pt", weights_only=True))


@pytest.mark.parametrize("layout", [*EXPERTS, *EXPERTS_ON_FOUR])
def test_consolidated_experts_equal_the_engines_masters_and_moments(experts: Path, tmp_path: Path, layout: str) -> None:
    if layout in EXPERTS_ON_FOUR:
        _require(4)
    consolidate(experts / "ours" / layout, tmp_path / "out", moments=True)
    require_live(tmp_path / "out", joined((experts / "live" / layout).iterdir()), name_in_switch_transformers)


@pytest.mark.parametrize("layout", PIPELINES)
def test_consolidated_pipelines_equal_the_engines_masters_and_moments(
    pipelines: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(pipelines / "theirs" / layout, tmp_path / "out", moments=True)
    require_live(tmp_path / "out", joined((pipelines / "live").glob(f"{layout}.[0-9].pt")))
