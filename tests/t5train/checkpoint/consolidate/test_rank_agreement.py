"""Refusals where no second copy of a weight could reveal a wrong file: at ZeRO 3, and for moments."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from t5train.checkpoint.consolidate import consolidate
from t5train.errors import IncompleteCheckpoint, T5TrainError, UnknownLayout

pytestmark = pytest.mark.slow
OPTIMIZER0, OPTIMIZER1 = (f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
MODEL0, MODEL1 = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2))


@pytest.fixture
def copy_tag(engines: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a tag without sidecars, for a test to damage."""

    def make(layout: str) -> Path:
        return Path(shutil.copytree(engines / "theirs" / layout / "global_step3", tmp_path / "in"))

    return make


@pytest.fixture(autouse=True)
def _nothing_is_written(tmp_path: Path) -> Iterator[None]:
    yield
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def require_refused(tag: Path, error: type[T5TrainError], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        consolidate(tag, tag.parent / "out", **options)


def change(path: Path, corrupt: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)  # a copy of what our own engines wrote
    corrupt(content)
    torch.save(content, path)


def swap_optimizers(tag: Path) -> None:
    (tag / OPTIMIZER0).rename(tag / "aside")
    (tag / OPTIMIZER1).rename(tag / OPTIMIZER0)
    (tag / "aside").rename(tag / OPTIMIZER1)


def shorten_sub_group(content: dict[str, Any]) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[1] = groups[1][:-1].clone()


def changing(name: str, corrupt: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda tag: change(tag / name, corrupt)


def setting(name: str, key: str, value: object) -> Callable[[Path], None]:
    return changing(name, lambda content: content.update({key: value}))


SIZES = "sub-group 1, but the parameters of that sub-group have 118 on each of 2 ranks"


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (swap_optimizers, IncompleteCheckpoint, f"{OPTIMIZER0} was written under the name {OPTIMIZER1}"),
        (setting(MODEL1, "global_steps", 4), IncompleteCheckpoint, "differ in global_steps"),
        (setting(MODEL1, "dp_world_size", 3), IncompleteCheckpoint, "differ in dp_world_size"),
        (setting(MODEL1, "ds_version", "0.1"), IncompleteCheckpoint, "differ in ds_version"),
        (setting(MODEL1, "param_shapes", []), IncompleteCheckpoint, "differ in param_shapes"),
        (setting(MODEL1, "buffer_names", []), IncompleteCheckpoint, "differ in buffer_names"),
        (lambda tag: (tag / OPTIMIZER1).unlink(), IncompleteCheckpoint, r"ranks \[1\] are missing"),
        (lambda tag: (tag / MODEL1).unlink(), IncompleteCheckpoint, r"ranks \[1\] are missing"),
        (changing(OPTIMIZER1, shorten_sub_group), T5TrainError, SIZES),
        (
            changing(MODEL1, lambda content: content["frozen_param_fragments"].clear()),
            IncompleteCheckpoint,
            "rank 1 hold no part of the frozen parameter scale",
        ),
        (setting(MODEL0, "ds_autoep_layers", [{"path": "moe"}]), UnknownLayout, "uses AutoEP"),
        (setting(MODEL0, "folding", [{"path": "moe"}]), UnknownLayout, "uses AutoEP"),
    ],
)
def test_files_of_zero_3_that_contradict_each_other_are_refused_and_named(
    copy_tag: Callable[[str], Path], damage: Callable[[Path], Any], error: type[T5TrainError], match: str
) -> None:
    tag = copy_tag("zero3-bf16")
    damage(tag)
    require_refused(tag, error, match)


@pytest.mark.parametrize(
    ("layout", "key"), [("zero3-bf16", "optimizer_state_dict"), ("zero2-bf16", "base_optimizer_state")]
)
def test_an_optimizer_file_of_another_step_is_detected_by_its_step_count(
    copy_tag: Callable[[str], Path], layout: str, key: str
) -> None:
    def corrupt(content: dict[str, Any]) -> None:
        for state in content["optimizer_state_dict"][key]["state"].values():
            state["step"] += 1

    tag = copy_tag(layout)
    change(tag / OPTIMIZER1, corrupt)
    require_refused(tag, IncompleteCheckpoint, r"differ in optimizer steps \(\[3\.0\] and \[4\.0\]\)")


def test_moments_of_another_kind_of_optimizer_are_refused_and_its_state_is_named(
    copy_tag: Callable[[str], Path],
) -> None:
    def corrupt(content: dict[str, Any]) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
            del state["exp_avg_sq"]

    tag = copy_tag("zero2-bf16")
    for name in (OPTIMIZER0, OPTIMIZER1):
        change(tag / name, corrupt)
    problem = r"only \['momentum_buffer', 'step'\]\. Consolidate the checkpoint without moments"
    require_refused(tag, UnknownLayout, problem, moments=True)
