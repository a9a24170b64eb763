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
MODEL1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


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


def test_swapped_optimizer_files_are_detected_by_the_names_stored_in_them(copy_tag: Callable[[str], Path]) -> None:
    tag = copy_tag("zero3-bf16")
    (tag / OPTIMIZER0).rename(tag / "aside")
    (tag / OPTIMIZER1).rename(tag / OPTIMIZER0)
    (tag / "aside").rename(tag / OPTIMIZER1)
    require_refused(tag, IncompleteCheckpoint, f"{OPTIMIZER0} was written under the name {OPTIMIZER1}")


@pytest.mark.parametrize("layout", ["zero3-bf16", "zero2-bf16"])
def test_an_optimizer_file_of_another_step_is_detected_by_its_step_count(
    copy_tag: Callable[[str], Path], layout: str
) -> None:
    def corrupt(content: dict[str, Any]) -> None:
        inner = content["optimizer_state_dict"]
        for state in inner[{"zero3-bf16": "optimizer_state_dict", "zero2-bf16": "base_optimizer_state"}[layout]][
            "state"
        ].values():
            state["step"] += 1

    tag = copy_tag(layout)
    change(tag / OPTIMIZER1, corrupt)
    require_refused(tag, IncompleteCheckpoint, r"differ in optimizer steps \(\[3\.0\] and \[4\.0\]\)")


@pytest.mark.parametrize(
    ("key", "value"),
    [("global_steps", 4), ("dp_world_size", 3), ("ds_version", "0.1"), ("param_shapes", []), ("buffer_names", [])],
)
def test_model_states_that_differ_between_ranks_are_refused(
    copy_tag: Callable[[str], Path], key: str, value: object
) -> None:
    tag = copy_tag("zero3-bf16")
    change(tag / MODEL1, lambda content: content.update({key: value}))
    require_refused(tag, IncompleteCheckpoint, f"differ in {key}")


@pytest.mark.parametrize("missing", [OPTIMIZER1, MODEL1])
def test_a_missing_rank_is_named(copy_tag: Callable[[str], Path], missing: str) -> None:
    tag = copy_tag("zero3-bf16")
    (tag / missing).unlink()
    require_refused(tag, IncompleteCheckpoint, r"ranks \[1\] are missing")


def test_a_sub_group_of_another_size_is_refused(copy_tag: Callable[[str], Path]) -> None:
    def corrupt(content: dict[str, Any]) -> None:
        groups = content["optimizer_state_dict"]["fp32_flat_groups"]
        groups[1] = groups[1][:-1].clone()

    tag = copy_tag("zero3-bf16")
    change(tag / OPTIMIZER1, corrupt)
    require_refused(tag, T5TrainError, "sub-group 1, but the parameters of that sub-group have 118 on each of 2 ranks")


def test_a_frozen_parameter_without_a_fragment_is_refused(copy_tag: Callable[[str], Path]) -> None:
    tag = copy_tag("zero3-bf16")
    change(tag / MODEL1, lambda content: content["frozen_param_fragments"].clear())
    require_refused(tag, IncompleteCheckpoint, "rank 1 hold no part of the frozen parameter scale")


@pytest.mark.parametrize("key", ["ds_autoep_layers", "folding"])
def test_a_checkpoint_that_uses_autoep_is_refused(copy_tag: Callable[[str], Path], key: str) -> None:
    tag = copy_tag("zero3-bf16")
    change(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", lambda content: content.update({key: [{"path": "moe"}]}))
    require_refused(tag, UnknownLayout, "uses AutoEP")


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
    require_refused(
        tag,
        UnknownLayout,
        r"only \['momentum_buffer', 'step'\]\. Consolidate the checkpoint without moments",
        moments=True,
    )
