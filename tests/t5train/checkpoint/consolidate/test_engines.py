"""Checkpoints of real DeepSpeed engines, compared with the engines' own tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import UnknownLayout
from tests.support.checkpoints.live_tensors import MOMENTS, consolidated, require_equal, require_live

pytestmark = pytest.mark.slow
UNTIED = ["zero1-bf16-untied", "zero2-bf16-untied", "zero2-fp32-untied", "zero3-bf16-untied"]
LAYOUTS = [
    "zero0-fp32", "zero1-fp32", "zero2-fp32", "zero0-bf16", "zero1-bf16", "zero2-bf16",
    "zero1-bf16-fp32-accumulation", "zero2-bf16-offload",
    "zero3-fp32", "zero3-bf16", "zero3-bf16-offload", *UNTIED,
]  # fmt: skip
NEED_SIDECARS = {"zero0-bf16"}


def live(engines: Path, layout: str) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(engines / "live" / f"{layout}.pt", weights_only=True)
    return held


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_with_sidecars_equal_the_engines_masters_and_moments_bit_for_bit(
    engines: Path, tmp_path: Path, layout: str
) -> None:
    weights = consolidate(engines / "ours" / layout, tmp_path / "out", shard_bytes=700, moments=True)
    assert {f"{key}.safetensors.index.json" for key in MOMENTS} <= weights.files.keys()
    require_live(tmp_path / "out", live(engines, layout))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in NEED_SIDECARS])
def test_checkpoints_without_sidecars_equal_the_engines_masters_and_moments_bit_for_bit(
    engines: Path, tmp_path: Path, layout: str
) -> None:
    moments = () if layout == "zero0-fp32" else MOMENTS
    consolidate(engines / "theirs" / layout, tmp_path / "out", moments=bool(moments))
    held = live(engines, layout)
    require_live(tmp_path / "out", held, moments=moments)
    if layout in UNTIED:
        require_equal(consolidated(tmp_path / "out"), held["zero_to_fp32"])


@pytest.mark.parametrize("owner", ["ours", "theirs"])
@pytest.mark.parametrize("layout", ["zero2-bf16", "zero3-bf16"])
def test_checkpoints_of_four_ranks_equal_the_engines_masters_and_moments_bit_for_bit(
    engines_on_four_ranks: Path, tmp_path: Path, layout: str, owner: str
) -> None:
    consolidate(engines_on_four_ranks / owner / layout, tmp_path / "out", moments=True)
    require_live(tmp_path / "out", live(engines_on_four_ranks, layout))


@pytest.mark.parametrize("owner", ["ours", "theirs"])
def test_masters_with_round_robin_gradients_round_to_the_engines_weights(
    engines: Path, tmp_path: Path, owner: str
) -> None:
    """DeepSpeed's own safe_get_full_fp32_param returns wrong values here, so the weights are the reference."""
    layout = "zero2-bf16-round-robin"
    consolidate(engines / owner / layout, tmp_path / "out", moments=owner == "ours")
    held, found = live(engines, layout), consolidated(tmp_path / "out")
    require_equal({name: found[name].bfloat16() for name in held["weights"]}, held["weights"])
    for key in MOMENTS if owner == "ours" else ():
        require_equal(consolidated(tmp_path / "out", key), held[key])


@pytest.mark.parametrize(
    ("layout", "moments", "problem"),
    [
        ("zero0-fp32", True, "cannot determine the positions of exp_avg"),
        ("zero0-bf16", False, "It has 2 parameter groups;"),
    ],
)
def test_what_cannot_be_determined_without_sidecars_is_refused_and_nothing_is_written(
    engines: Path, tmp_path: Path, layout: str, moments: bool, problem: str
) -> None:
    with pytest.raises(UnknownLayout, match=problem):
        consolidate(engines / "theirs" / layout, tmp_path / "out", moments=moments)
    assert not any(tmp_path.iterdir())
