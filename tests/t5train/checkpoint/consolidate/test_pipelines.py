"""Checkpoints of real DeepSpeed pipelines, compared with the tensors of their stages."""

import shutil
from pathlib import Path

import pytest
import torch

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import IncompleteCheckpoint
from tests.support.checkpoints.deepspeed_pipeline_checkpoints import HUGGINGFACE
from tests.support.checkpoints.live_tensors import Tensors, consolidated, joined, require_live

pytestmark = pytest.mark.slow
LAYOUTS = [
    "zero1-bf16", "zero1-fp32", "zero1-bf16-fp32-accumulation", "zero0-bf16", "zero0-fp32", "zero1-bf16-node-local",
    "zero1-bf16-one-stage",
]  # fmt: skip


def live(engines: Path, layout: str) -> dict[str, Tensors]:
    return joined((engines / "live").glob(f"{layout}.[0-9].pt"))


def huggingface_name(name: str) -> str:
    (renamed,) = (f"{path}{name.removeprefix(at)}" for at, path in HUGGINGFACE.items() if name.startswith(f"{at}."))
    return renamed


@pytest.mark.parametrize("owner", ["ours", "theirs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipelines_equal_the_engines_tensors_by_hugging_face_name_or_without_sidecars_by_layer(
    pipeline_engines: Path, tmp_path: Path, layout: str, owner: str
) -> None:
    if (layout, owner) == ("zero0-fp32", "theirs"):
        consolidate(pipeline_engines / owner / layout, tmp_path / "out")
        held = live(pipeline_engines, layout)
        held["masters"]["0.weight"] = held["masters"].pop("tied_modules.embed.weight")
        require_live(tmp_path / "out", held, moments=())  # without a DeepSpeed optimizer, the layer's file names it
        return
    consolidate(pipeline_engines / owner / layout, tmp_path / "out", moments=True)
    require_live(tmp_path / "out", live(pipeline_engines, layout), huggingface_name if owner == "ours" else str)


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
    held = {kind: last[kind] | first[kind] for kind in last}
    require_live(tmp_path / "out", held, huggingface_name if owner == "ours" else str)


@pytest.fixture
def of_torch(pipeline_engines: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint without sidecars and without a DeepSpeed optimizer, for a test to change."""
    source = pipeline_engines / "theirs" / "zero0-fp32" / "global_step3"
    return Path(shutil.copytree(source, tmp_path / "in" / "global_step3"))


def test_a_missing_layer_is_refused_even_if_no_file_names_the_layers(of_torch: Path, tmp_path: Path) -> None:
    (of_torch / "layer_00-model_states.pt").unlink()
    require_refused(of_torch, tmp_path / "out", r"1 parameters of shape \(17, 9\), but the layers' files hold 0")


def test_a_parameter_that_a_stage_never_trains_is_not_counted_as_missing(of_torch: Path, tmp_path: Path) -> None:
    positions = torch.rand(6, 9)
    for stage, moment in enumerate((torch.rand(6, 9), torch.zeros(6, 9))):
        path = of_torch / f"mp_rank_{stage:02d}_model_states.pt"
        model = torch.load(path, weights_only=False)  # a copy of what our own engines wrote
        model["optimizer"]["state"][99] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment}
        torch.save(model, path)
    path = of_torch / "layer_00-model_states.pt"
    torch.save(torch.load(path) | {"positions": positions}, path)
    consolidate(of_torch, tmp_path / "out")
    assert torch.equal(consolidated(tmp_path / "out")["0.positions"], positions)


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
    found = consolidated(tmp_path / "out")
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
