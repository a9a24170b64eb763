"""Consolidating generated checkpoints of mixtures of experts: names, ties, and refusals of contradictory files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint import sidecar
from t5train.checkpoint.consolidate import consolidate
from t5train.errors import IncompleteCheckpoint, T5TrainError, UnknownLayout
from tests.support.checkpoints.deepspeed_files import EXPERTS, Layout, Written
from tests.support.checkpoints.sidecar_files import write

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
Edit = Callable[[dict[str, Any]], Any]


def checkpoint(folder: Path, *, sidecars: bool = False, **settings: Any) -> Written:
    """A checkpoint of four ranks with two layers of four experts: one over two expert-parallel ranks, one over four."""
    layout = {"groups": [[(5, 3)]], "ranks": 4, "experts": [(4, 2), (4, 4)]} | settings
    return write(folder / "in", Layout(**layout), sidecars=sidecars)


def expert_file(layer: int, expert: int) -> str:
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def edit(tag: Path, name: str, change: Edit) -> None:
    """Change the content of a file."""
    content = torch.load(tag / name, weights_only=False)  # a file that this test wrote
    change(content)
    torch.save(content, tag / name)


def require_refused(error: type[T5TrainError], match: str, written: Written, out: Path) -> None:
    with pytest.raises(error, match=match):
        consolidate(written.tag, out)
    assert not out.exists()


def copy_experts(tag: Path, layer: int, experts: dict[int, int]) -> None:
    """Store experts of layer 0 as others of a layer."""
    for expert, stored_as in experts.items():
        torch.save(torch.load(tag / expert_file(0, expert)), tag / expert_file(layer, stored_as))


@pytest.mark.parametrize(
    ("stage", "damage", "found"),
    [
        (2, lambda tag: (tag / expert_file(1, 2)).unlink(), "expert 2 of layer 1 is missing"),
        (2, lambda tag: copy_experts(tag, 0, {3: 4}), "expert 4 of layer 0 is one too many"),
        (
            2,
            lambda tag: copy_experts(tag, 0, {1: 2}),
            rf"{expert_file(0, 2)} should hold expert 2 .*deepspeed_experts\.1",
        ),
        (2, lambda tag: copy_experts(tag, 1, {e: e for e in range(4)}), r"0 and 1 both hold the experts of moe\.0"),
        (0, lambda tag: (tag / "expp_rank_2_mp_rank_00_optim_states.pt").unlink(), r"ranks \[2\] are missing"),
    ],
)
def test_missing_superfluous_and_exchanged_files_of_experts_are_refused_and_named(
    tmp_path: Path, stage: int, damage: Callable[[Path], None], found: str
) -> None:
    written = checkpoint(tmp_path, stage=stage)
    damage(written.tag)
    require_refused(IncompleteCheckpoint, found, written, tmp_path / "out")


def rename_parameter_group(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["name"] = "ep_size_4"


def partition_over_three_ranks(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["partition_count"][1] = 3


@pytest.mark.parametrize("change", [rename_parameter_group, partition_over_three_ranks])
def test_a_parameter_group_with_contradictory_expert_parallel_sizes_is_refused(tmp_path: Path, change: Edit) -> None:
    written = checkpoint(tmp_path)
    for rank in range(4):
        edit(written.tag, OPTIMIZER.format(rank), change)
    require_refused(UnknownLayout, "parameter group 1 contradict each other", written, tmp_path / "out")


def mix_parameter_group(model: dict[str, Any]) -> None:
    dense, experts, *others = model["param_shapes"]
    model["param_shapes"] = [dense, {"layer0.weight0": torch.Size((5, 3)), **experts}, *others]


def test_a_parameter_group_that_mixes_experts_and_other_parameters_is_refused(tmp_path: Path) -> None:
    written = checkpoint(tmp_path)
    edit(written.tag, MODEL, mix_parameter_group)
    require_refused(IncompleteCheckpoint, r"groups have \[1, 5, 2\] parameters", written, tmp_path / "out")
    for rank in range(4):
        edit(written.tag, OPTIMIZER.format(rank), lambda c: c["optimizer_state_dict"].pop("param_alignment_paddings"))
    require_refused(UnknownLayout, r"the group holds \['layer0", written, tmp_path / "out")


EXPERT_TIED_TO_DENSE = {f"moe.1.{EXPERTS}.0.w0": "layer0.weight0"}


@pytest.mark.parametrize(
    ("model", "error", "found"),
    [
        ({"num_experts": 4}, UnknownLayout, "num_experts is 4, but must be a list"),
        ({"shared_params": EXPERT_TIED_TO_DENSE}, UnknownLayout, "only be tied to weights of the same expert"),
        (
            {"ds_config": {"use_data_before_expert_parallelism": True}},
            T5TrainError,
            "another checkpoint|differs from the weight",
        ),
    ],
)
def test_model_states_that_contradict_the_files_of_experts_are_refused(
    tmp_path: Path, model: dict[str, Any], error: type[T5TrainError], found: str
) -> None:
    written = checkpoint(tmp_path, experts=[(4, 2), (4, 2)])
    edit(written.tag, MODEL, lambda states: states.update(model))
    require_refused(error, found, written, tmp_path / "out")


def test_a_number_of_experts_that_differs_from_the_sidecars_is_refused(tmp_path: Path) -> None:
    written = checkpoint(tmp_path, sidecars=True)
    for one in sidecar.read_all(written.tag):
        layers = [layer.model_copy(update={"num_experts": 8}) for layer in one.expert_layers]
        sidecar.write(written.tag, one.model_copy(update={"expert_layers": layers}))
    require_refused(IncompleteCheckpoint, r"'moe\.0': 4.*in the files, but .*'moe\.0': 8", written, tmp_path / "out")


def test_a_tie_recorded_for_one_expert_applies_to_all_experts_of_the_layer(tmp_path: Path) -> None:
    written = checkpoint(tmp_path)
    ties = {f"moe.1.{EXPERTS}.0.again": f"moe.1.{EXPERTS}.0.w0"}
    edit(written.tag, MODEL, lambda model: model.update(shared_params=ties))
    for expert in range(4):
        name = f"moe.1.{EXPERTS}.{expert}"
        edit(
            written.tag,
            expert_file(1, expert),
            lambda c, name=name: c.update({f"{name}.again": c[f"{name}.w0"].clone()}),
        )
    consolidate(written.tag, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == written.expected.keys()


def test_with_sidecars_experts_and_gates_get_hugging_face_names(tmp_path: Path) -> None:
    written = checkpoint(tmp_path, sidecars=True)
    consolidate(written.tag, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {f"block.0.mlp.experts.expert_{expert}.w0" for expert in range(4)} < names
    assert not any(re.search("deepspeed", name) for name in names)
    layer = sidecar.read_all(written.tag)[0].expert_layers[0]
    assert layer.huggingface_name("moe.0.deepspeed_moe.gate.wg.weight") == "block.0.mlp.router.classifier.weight"
    assert layer.huggingface_name("moe.01.deepspeed_moe.gate.wg.weight").startswith("moe.01")


def test_without_a_stored_configuration_the_default_rank_order_is_assumed_and_verified(
    tmp_path: Path,
) -> None:
    written = checkpoint(tmp_path / "default")
    other = checkpoint(tmp_path / "consecutive", experts=[(4, 2)], consecutive=True)
    for tag in (written.tag, other.tag):
        edit(tag, MODEL, lambda model: model.update(ds_config="ds_config.json"))
    consolidate(written.tag, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in written.expected.items())
    require_refused(T5TrainError, "another checkpoint|differs from the weight", other, tmp_path / "other")
