"""Checkpoints of real DeepSpeed pipelines, compared with the tensors of their stages."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import IncompleteCheckpoint
from tests.support.checkpoints.deepspeed_pipeline_checkpoints import HUGGINGFACE

pytestmark = pytest.mark.slow
LAYOUTS = [
    "zero1-bf16", "zero1-fp32", "zero1-bf16-fp32-accumulation", "zero0-bf16", "zero0-fp32", "zero1-bf16-node-local",
    "zero1-bf16-one-stage",
]  # fmt: skip
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


def live(engines: Path, layout: str, kind: str) -> Tensors:
    """The tensors of all stages. A tied parameter must be equal in all of its stages."""
    held: Tensors = {}
    for path in sorted((engines / "live").glob(f"{layout}.*.pt")):
        for name, tensor in torch.load(path, weights_only=True)[kind].items():
            assert torch.equal(held.setdefault(name, tensor), tensor), name
    return held


def with_huggingface_names(tensors: Tensors) -> Tensors:
    """The tensors by Hugging Face's names."""
    return {
        f"{path}{name.removeprefix(layer)}": tensor
        for name, tensor in tensors.items()
        for layer, path in HUGGINGFACE.items()
        if name.startswith(f"{layer}.")
    }


def require_equal(found: Tensors, wanted: Tensors) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipelines_with_sidecars_equal_the_engines_tensors_by_hugging_face_name(
    pipeline_engines: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(pipeline_engines / "ours" / layout, tmp_path / "out", moments=True)
    held = live(pipeline_engines, layout, "masters") | live(pipeline_engines, layout, "buffers")
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), with_huggingface_names(held))
    for key in MOMENTS:
        found = load_file(tmp_path / "out" / f"{key}.safetensors")
        require_equal(found, with_huggingface_names(live(pipeline_engines, layout, key)))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "zero0-fp32"])
def test_pipelines_without_sidecars_equal_the_engines_tensors_by_layer(
    pipeline_engines: Path, tmp_path: Path, layout: str
) -> None:
    consolidate(pipeline_engines / "theirs" / layout, tmp_path / "out", moments=True)
    held = live(pipeline_engines, layout, "masters") | live(pipeline_engines, layout, "buffers")
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), held)
    for key in MOMENTS:
        require_equal(load_file(tmp_path / "out" / f"{key}.safetensors"), live(pipeline_engines, layout, key))


@pytest.mark.parametrize("owner", ["ours", "theirs"])
def test_a_parameter_of_a_tied_module_is_taken_from_the_stage_that_trains_it(
    pipeline_engines: Path, tmp_path: Path, owner: str
) -> None:
    consolidate(pipeline_engines / owner / "zero1-bf16-partly-tied", tmp_path / "out", moments=True)
    first, last = (
        torch.load(pipeline_engines / "live" / f"zero1-bf16-partly-tied.{stage}.pt", weights_only=True)
        for stage in (0, 1)
    )
    positions = "tied_modules.embed.places.weight"
    assert not torch.equal(first["masters"][positions], last["masters"][positions])
    held = last["masters"] | last["buffers"] | first["masters"] | first["buffers"]
    require_equal(
        load_file(tmp_path / "out" / "model.safetensors"), with_huggingface_names(held) if owner == "ours" else held
    )
    for key in MOMENTS:
        held = last[key] | first[key]
        require_equal(
            load_file(tmp_path / "out" / f"{key}.safetensors"),
            with_huggingface_names(held) if owner == "ours" else held,
        )


def test_without_a_deepspeed_optimizer_a_tied_layer_is_named_after_its_file(
    pipeline_engines: Path, tmp_path: Path
) -> None:
    consolidate(pipeline_engines / "theirs" / "zero0-fp32", tmp_path / "out")
    held = live(pipeline_engines, "zero0-fp32", "masters") | live(pipeline_engines, "zero0-fp32", "buffers")
    held["0.weight"] = held.pop("tied_modules.embed.weight")
    require_equal(load_file(tmp_path / "out" / "model.safetensors"), held)


def test_a_missing_layer_is_refused_even_if_no_file_names_the_layers(pipeline_engines: Path, tmp_path: Path) -> None:
    source = pipeline_engines / "theirs" / "zero0-fp32" / "global_step3"
    tag = Path(shutil.copytree(source, tmp_path / "in" / "global_step3"))
    (tag / "layer_00-model_states.pt").unlink()
    require_refused(tag, tmp_path / "out", r"1 parameters of shape \(17, 9\), but the layers' files hold 0")


def test_a_parameter_that_a_stage_never_trains_is_not_counted_as_missing(
    pipeline_engines: Path, tmp_path: Path
) -> None:
    source = pipeline_engines / "theirs" / "zero0-fp32" / "global_step3"
    tag = Path(shutil.copytree(source, tmp_path / "in" / "global_step3"))
    positions = torch.rand(6, 9)
    for stage, moment in enumerate((torch.rand(6, 9), torch.zeros(6, 9))):
        path = tag / f"mp_rank_{stage:02d}_model_states.pt"
        model = torch.load(path, weights_only=False)  # a copy of what our own engines wrote
        model["optimizer"]["state"][99] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment}
        torch.save(model, path)
    path = tag / "layer_00-model_states.pt"
    torch.save(torch.load(path) | {"positions": positions}, path)
    consolidate(tag, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["0.positions"], positions)


@pytest.fixture
def tag(pipeline_engines: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint without sidecars, for a test to change."""
    source = pipeline_engines / "theirs" / "zero1-bf16" / "global_step3"
    return Path(shutil.copytree(source, tmp_path / "in" / "global_step3"))


def require_refused(tag: Path, out: Path, match: str) -> None:
    with pytest.raises(IncompleteCheckpoint, match=match):
        consolidate(tag, out)
    assert not out.exists()


def test_an_unrecorded_tie_within_a_stage_is_detected_by_equal_weights(tag: Path, tmp_path: Path) -> None:
    path = tag / "layer_04-model_states.pt"
    content = torch.load(path, weights_only=True)
    same_value = torch.full_like(content["weight"], 0.5)
    torch.save(content | {"tie": content["weight"].clone(), "frozen": same_value}, path)
    consolidate(tag, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "4.tie" not in found
    assert torch.equal(found["4.frozen"], same_value.float())


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("layer_02-model_states.pt", "lacks layer_02-model_states.pt"),
        ("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", r"ranks \[1\] are missing"),
    ],
)
def test_a_missing_layer_or_rank_of_a_stage_is_refused(tag: Path, tmp_path: Path, missing: str, message: str) -> None:
    (tag / missing).unlink()
    require_refused(tag, tmp_path / "out", message)


def test_a_tied_parameter_that_differs_between_stages_is_refused(tag: Path, tmp_path: Path) -> None:
    path = tag / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    content = torch.load(path, weights_only=False)  # a copy of what our own engines wrote
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[3] += 0.25
    torch.save(content, path)
    require_refused(tag, tmp_path / "out", r"tied_modules\.embed\.weight")


def test_a_stage_of_another_step_is_refused(tag: Path, tmp_path: Path) -> None:
    path = tag / "mp_rank_01_model_states.pt"
    torch.save(torch.load(path, weights_only=False) | {"global_steps": 4}, path)  # a copy of what our own engines wrote
    require_refused(tag, tmp_path / "out", r"differ in global_steps \(3 and 4\)")
