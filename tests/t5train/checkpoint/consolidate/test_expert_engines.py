"""Checkpoints of real DeepSpeed engines with experts, compared with the engines' own tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import UnknownLayout
from tests.support.checkpoints.live_tensors import (
    MOMENTS,
    Tensors,
    consolidated,
    joined,
    name_in_switch_transformers,
    require_equal,
    require_live,
)

pytestmark = pytest.mark.slow
ON_TWO = ["zero0-bf16-plain", "zero1-fp32"]
"""What the other layouts of two ranks combine, those of four ranks combine as well."""
ON_FOUR = [
    "zero0-fp32", "zero0-bf16", "zero1-bf16", "zero2-bf16-every-expert-everywhere", *ON_TWO,
    "zero0-bf16-ep2", "zero0-bf16-mixed-sizes", "zero0-bf16-data-before-experts", "zero1-bf16-fp32-accumulation",
    "zero1-bf16-mixed-sizes", "zero2-bf16-split", "zero2-bf16-aligned", "zero2-bf16-offload",
    "zero2-bf16-data-before-experts",
]  # fmt: skip
LAYOUTS = [(2, name) for name in ON_TWO] + [(4, name) for name in ON_FOUR]
NEED_SIDECARS = {"zero0-bf16", "zero0-bf16-ep2", "zero0-bf16-mixed-sizes", "zero0-bf16-data-before-experts"}
Engines = Callable[..., Path]


def folder_of(engines: Engines, ranks: int) -> Path:
    return engines(ranks, *(ON_TWO if ranks == 2 else ()))


def live(folder: Path, layout: str) -> dict[str, Tensors]:
    return joined((folder / "live" / layout).iterdir())


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_experts_with_sidecars_equal_the_engines_tensors_by_hugging_face_name(
    expert_engines: Engines, tmp_path: Path, ranks: int, layout: str
) -> None:
    folder = folder_of(expert_engines, ranks)
    moments = () if layout == "zero0-fp32" else MOMENTS  # there their order is the optimizer's own and not recorded
    consolidate(folder / "ours" / layout, tmp_path / "out", moments=bool(moments))
    require_live(tmp_path / "out", live(folder, layout), name_in_switch_transformers, moments)


@pytest.mark.parametrize(("ranks", "layout"), [(ranks, name) for ranks, name in LAYOUTS if name not in NEED_SIDECARS])
def test_experts_without_sidecars_equal_the_engines_tensors_numbered_over_all_ranks(
    expert_engines: Engines, tmp_path: Path, ranks: int, layout: str
) -> None:
    folder = folder_of(expert_engines, ranks)
    consolidate(folder / "theirs" / layout, tmp_path / "out")
    found = consolidated(tmp_path / "out")
    held = live(folder, layout)
    if layout == "zero0-fp32":  # here DeepSpeed saves a tie as two tensors and does not record it
        assert torch.equal(found.pop("decoder.weight"), held["masters"]["shared.weight"])
    require_equal(found, held["masters"] | held["buffers"])


@pytest.mark.parametrize("owner", ["ours", "theirs"])
def test_masters_with_round_robin_gradients_round_to_the_engines_weights(
    expert_engines: Engines, tmp_path: Path, owner: str
) -> None:
    """DeepSpeed's own safe_get_full_fp32_param returns wrong values here, so the weights are the reference."""
    folder, layout = expert_engines(4), "zero2-bf16-round-robin"
    consolidate(folder / owner / layout, tmp_path / "out")
    found = consolidated(tmp_path / "out")
    weights = {}
    for path in (folder / "live" / layout).iterdir():
        weights |= torch.load(path, weights_only=True)["weights"]
    weights = {
        name_in_switch_transformers(name) if owner == "ours" else name: weight for name, weight in weights.items()
    }
    require_equal({name: found[name].bfloat16() for name in weights}, weights)


@pytest.mark.parametrize("layout", sorted(NEED_SIDECARS))
def test_zero_0_with_ties_or_several_expert_parallel_sizes_needs_sidecars(
    expert_engines: Engines, tmp_path: Path, layout: str
) -> None:
    with pytest.raises(UnknownLayout, match="cannot be determined"):
        consolidate(expert_engines(4) / "theirs" / layout, tmp_path / "out")
    assert not any(tmp_path.iterdir())
