"""Checkpoints of real DeepSpeed engines, compared with the engines' own tensors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import UnknownLayout

pytestmark = pytest.mark.slow
TIED = [
    "zero0-fp32", "zero1-fp32", "zero2-fp32", "zero0-bf16", "zero1-bf16", "zero2-bf16",
    "zero1-bf16-fp32-accumulation", "zero2-bf16-offload",
    "zero3-fp32", "zero3-bf16", "zero3-bf16-offload",
]  # fmt: skip
UNTIED = ["zero1-bf16-untied", "zero2-bf16-untied", "zero2-fp32-untied", "zero3-bf16-untied"]
NEED_SIDECARS = {"zero0-bf16"}


def live(engines: Path, layout: str) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(engines / "live" / f"{layout}.pt", weights_only=True)
    return held


def expected(held: dict[str, Any]) -> dict[str, torch.Tensor]:
    buffers = {name: b.float() if b.is_floating_point() else b for name, b in held["buffers"].items()}
    return {**held["masters"], **buffers}


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", TIED + UNTIED)
def test_checkpoints_with_sidecars_equal_the_engines_masters_bit_for_bit(
    engines: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(engines / "ours" / layout, tmp_path / "out")
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), expected(live(engines, layout)))


@pytest.mark.parametrize("layout", [name for name in TIED + UNTIED if name not in NEED_SIDECARS])
def test_checkpoints_without_sidecars_equal_the_engines_masters_bit_for_bit(
    engines: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(engines / "theirs" / layout, tmp_path / "out")
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), expected(live(engines, layout)))


@pytest.mark.parametrize("owner", ["ours", "theirs"])
@pytest.mark.parametrize("layout", ["zero2-bf16", "zero3-bf16"])
def test_checkpoints_of_four_ranks_equal_the_engines_masters_and_moments_bit_for_bit(
    engines_on_four_ranks: Path, tmp_path: Path, layout: str, owner: str
) -> None:
    consolidate(engines_on_four_ranks / owner / layout, tmp_path / "out", moments=True)
    held = live(engines_on_four_ranks, layout)
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), expected(held))
    for key in ("exp_avg", "exp_avg_sq"):
        require_equal(load_file(tmp_path / "out" / f"{key}.safetensors"), held[key])


@pytest.mark.parametrize("layout", [*TIED, *UNTIED, "zero2-bf16-round-robin"])
def test_moments_of_checkpoints_with_sidecars_equal_the_optimizers_bit_for_bit(
    engines: Path, tmp_path: Path, layout: str
) -> None:
    weights = consolidate(engines / "ours" / layout, tmp_path / "out", shard_bytes=700, moments=True)
    held = live(engines, layout)
    for key in ("exp_avg", "exp_avg_sq"):
        names = [name for name in weights.files if re.fullmatch(rf"{key}-.*\.safetensors", name)]
        assert f"{key}.safetensors.index.json" in weights.files
        require_equal({k: v for name in names for k, v in load_file(tmp_path / "out" / name).items()}, held[key])


@pytest.mark.parametrize("layout", [name for name in TIED if name not in NEED_SIDECARS | {"zero0-fp32"}])
def test_moments_of_checkpoints_without_sidecars_equal_the_optimizers_bit_for_bit(
    engines: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(engines / "theirs" / layout, tmp_path / "out", moments=True)
    held = live(engines, layout)
    for key in ("exp_avg", "exp_avg_sq"):
        require_equal(load_file(tmp_path / "out" / f"{key}.safetensors"), held[key])


def test_moments_whose_positions_are_unknown_are_refused_and_nothing_is_written(engines: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownLayout, match="cannot determine the positions of exp_avg"):
        consolidate(engines / "theirs" / "zero0-fp32", tmp_path / "out", moments=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("owner", ["ours", "theirs"])
def test_masters_with_round_robin_gradients_round_to_the_engines_weights(
    engines: Path, tmp_path: Path, owner: str
) -> None:
    """DeepSpeed's own safe_get_full_fp32_param returns wrong values here, so the weights are the reference."""
    layout = "zero2-bf16-round-robin"
    consolidate(engines / owner / layout, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    weights = live(engines, layout)["weights"]
    require_equal({name: found[name].bfloat16() for name in weights}, weights)


@pytest.mark.parametrize("layout", UNTIED)
def test_untied_weights_equal_the_output_of_deepspeeds_zero_to_fp32(engines: Path, tmp_path: Path, layout: str) -> None:
    consolidate(engines / "theirs" / layout, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    theirs = live(engines, layout)["zero_to_fp32"]
    require_equal(found, theirs)


def test_a_tied_weight_is_written_only_under_its_owners_name(engines: Path, tmp_path: Path) -> None:
    consolidate(engines / "ours" / "zero2-bf16", tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "shared.weight" in names
    assert "decoder.weight" not in names


def test_zero_0_with_two_parameter_groups_and_no_sidecars_is_refused(engines: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownLayout, match="It has 2 parameter groups;"):
        consolidate(engines / "theirs" / "zero0-bf16", tmp_path / "out")
    assert not any(tmp_path.iterdir())
