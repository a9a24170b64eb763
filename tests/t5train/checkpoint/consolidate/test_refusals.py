"""Checkpoints that must not be consolidated are refused, and a refusal leaves no files behind."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate, consolidation, torch_file
from t5train.errors import (
    ConsolidationError,
    IncompleteCheckpoint,
    InputError,
    StorageError,
    T5TrainError,
    UnknownLayout,
    Unreadable,
)

MODEL = "mp_rank_00_model_states.pt"
RANK1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def require_refused(error: type[T5TrainError], match: str, checkpoint: Path, out: Path, **options: Any) -> None:
    before = sorted(out.parent.iterdir())
    with pytest.raises(error, match=match) as caught:
        consolidate(checkpoint, out, **options)
    if isinstance(caught.value, ConsolidationError):
        assert str(checkpoint) in str(caught.value)
    assert sorted(out.parent.iterdir()) == before


def test_without_sidecars_a_flipped_bit_is_refused_or_changes_no_tensor(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written = write_checkpoint(frozen=[(3, 3)], buffers=1)
    refused = 0
    for seed in range(150):
        damaged, out, rng = tmp_path / "damaged", tmp_path / "out", random.Random(seed)
        shutil.copytree(written.tag, damaged)
        path = rng.choice(sorted(damaged.iterdir()))
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            consolidate(damaged, out)
        except (IncompleteCheckpoint, ConsolidationError):
            refused += 1
            assert not out.exists()
        else:
            found = load_file(out / "model.safetensors")
            assert all(torch.equal(found[name], tensor) for name, tensor in written.expected.items()), seed
            shutil.rmtree(out)
        shutil.rmtree(damaged)
    assert refused > 30


@pytest.mark.parametrize("bit", [0, 7, 12])
def test_a_flipped_master_bit_that_rounding_hides_is_detected(
    write_checkpoint: Callable[..., Any], tmp_path: Path, bit: int
) -> None:
    """The lowest bits of a master do not affect its bf16 weight, but the archive's checksum detects a change."""
    written = write_checkpoint()
    path = written.tag / RANK1
    master = torch_file.read_metadata(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    content = bytearray(path.read_bytes())
    content[master.offset + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    require_refused(IncompleteCheckpoint, rf"{RANK1} is damaged.*CRC-32", written.tag, tmp_path / "out")


def test_an_optimizer_partition_that_does_not_round_to_the_weights_is_refused(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written, later = write_checkpoint(seed=1), write_checkpoint(seed=2)
    shutil.copy(later.tag / RANK1, written.tag / RANK1)
    require_refused(IncompleteCheckpoint, rf"{RANK1}, rounded to BF16, differs from", written.folder, tmp_path / "out")


def without_rank_1(tag: Path) -> None:
    (tag / RANK1).unlink()


def truncate(tag: Path) -> None:
    os.truncate(tag / RANK1, (tag / RANK1).stat().st_size // 2)


def with_fewer_parameters(tag: Path) -> None:
    change_model(tag, lambda model: model.update(param_shapes=[{"layer0.weight0": torch.Size((5, 3))}]))


def without_a_weight(tag: Path) -> None:
    change_model(tag, lambda model: model.update(module={"other": torch.ones(2)}))


def with_a_false_tie(tag: Path) -> None:
    def tie(model: dict[str, Any]) -> None:
        model["module"]["alias"] = model["module"]["layer0.weight0"] + 1
        model["shared_params"] = {"alias": "layer0.weight0"}

    change_model(tag, tie)


def change_model(tag: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    model = torch.load(tag / MODEL, weights_only=False)  # a file that this test wrote
    change(model)
    torch.save(model, tag / MODEL)


ONE = {"groups": [[(5, 3)]]}


@pytest.mark.parametrize(
    ("layout", "damage", "error", "match"),
    [
        ({"ranks": 4}, without_rank_1, IncompleteCheckpoint, r"ranks \[1\] are missing"),
        ({}, truncate, IncompleteCheckpoint, f"{RANK1} is truncated"),
        (
            {"groups": [[(5, 3), (40,)]], "keep_padding": True},
            with_fewer_parameters,
            ConsolidationError,
            "the parameters need 15",
        ),
        (ONE, without_a_weight, ConsolidationError, r"an fp32 master of layer0\.weight0, but"),
        (ONE, with_a_false_tie, IncompleteCheckpoint, r"files of layer0\.weight0 are damaged .*: the fp32 master"),
    ],
)
def test_without_sidecars_incomplete_and_contradictory_files_are_refused_and_named(
    write_checkpoint: Callable[..., Any], tmp_path: Path, layout: dict[str, Any], damage: Callable[[Path], None],
    error: type[T5TrainError], match: str,
) -> None:  # fmt: skip
    written = write_checkpoint(**layout)
    damage(written.tag)
    require_refused(error, match, written.folder, tmp_path / "out")


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_a_hostile_pickle_is_refused_and_does_not_run(write_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    written, target = write_checkpoint(), tmp_path / "ran"
    change_model(written.tag, lambda model: model.update(client=Hostile(target)))
    require_refused(ConsolidationError, f"{MODEL} is not loaded", written.folder, tmp_path / "out")
    assert not target.exists()


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    (tmp_path / "tag").mkdir()
    return tmp_path / "tag"


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (["zero_pp_rank_0_mp_rank_00_model_states.pt", MODEL], "ZeRO 3"),
        ([MODEL, "layer_0_expert_3_mp_rank_00_model_states.pt"], "a mixture of experts"),
        ([MODEL, "layer_03-model_states.pt", "layer_0_expert_3_mp_rank_00_model_states.pt"], "a pipeline"),
        ([MODEL, "layer_03-model_01-model_states.pt"], "the file layer_03-model_01-model_states"),
        ([MODEL, "mp_rank_01_model_states.pt"], "tensor or pipeline parallelism"),
        ([MODEL, "zero/"], "a universal checkpoint"),
        ([MODEL, "offloaded_tensors/"], "NVMe"),
    ],
)
def test_an_unsupported_layout_is_refused_and_named(tag: Path, tmp_path: Path, names: list[str], seen: str) -> None:
    for name in names:
        (tag / name).mkdir() if name.endswith("/") else torch.save({}, tag / name)
    require_refused(UnknownLayout, seen, tag, tmp_path / "out")


def test_zero_0_in_bf16_without_masters_is_refused(tag: Path, tmp_path: Path) -> None:
    torch.save({"module": {"a": torch.ones(3, dtype=torch.bfloat16)}, "optimizer": None}, tag / MODEL)
    require_refused(UnknownLayout, "a is BF16 and has no fp32 master", tag, tmp_path / "out")


def test_an_invalid_or_missing_latest_file_is_refused(write_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    written = write_checkpoint()
    for text, message in [("global_step8", "has no tag 'global_step8'"), ("../elsewhere", "not the name of a tag")]:
        (written.folder / "latest").write_text(text)
        require_refused(InputError, message, written.folder, tmp_path / "out")
    (written.folder / "latest").unlink()
    require_refused(InputError, "no file 'latest'.*global_step7", written.folder, tmp_path / "out")


def test_the_newest_complete_tag_is_used_regardless_of_latest(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    older, newer, broken = (write_checkpoint(sidecars=True, step=step, seed=step) for step in (7, 8, 9))
    newer.tag.rename(older.folder / newer.tag.name)
    broken.tag.rename(older.folder / broken.tag.name)
    (older.folder / "global_step9" / RANK1).unlink()
    weights = consolidate(older.folder, tmp_path / "out")
    assert weights.counts["step"] == 8
    assert consolidate(older.folder, tmp_path / "other", tag="global_step7").counts["step"] == 7
    require_refused(IncompleteCheckpoint, RANK1, older.folder, tmp_path / "third", tag="global_step9")


def test_a_checkpoint_folder_without_a_complete_tag_is_refused(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written = write_checkpoint(sidecars=True)
    (written.tag / "rank-00000.json").unlink()
    require_refused(IncompleteCheckpoint, "no complete tag", written.folder, tmp_path / "out")


@pytest.mark.parametrize("sidecars", [True, False])
def test_consolidating_again_verifies_and_reuses_the_existing_weights(
    write_checkpoint: Callable[..., Any], tmp_path: Path, sidecars: bool
) -> None:
    written = write_checkpoint(sidecars=sidecars)
    first = consolidate(written.folder, tmp_path / "out")
    inode = (tmp_path / "out" / "model.safetensors").stat().st_ino
    again = consolidate(written.folder, tmp_path / "out")
    assert again.reused
    assert again.fingerprint == first.fingerprint
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == inode


def test_damaged_weights_are_consolidated_again_but_not_beside_an_unrelated_file(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written, out = write_checkpoint(sidecars=True), tmp_path / "out"
    first = consolidate(written.folder, out)
    (out / "model.safetensors").write_bytes(b"damaged")
    again = consolidate(written.folder, out)
    assert (again.reused, again.files) == (False, first.files)
    again.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint0", "out", "out.aside-1"]
    (out / "thesis.txt").write_text("mine")
    assert consolidate(written.folder, out).reused
    (out / "model.safetensors").write_bytes(b"damaged")
    require_refused(StorageError, "damaged weights and an unrelated file, thesis.txt", written.folder, out)
    assert (out / "thesis.txt").read_text() == "mine"


def test_an_output_folder_with_other_content_is_refused_and_left_unchanged(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written, other = write_checkpoint(sidecars=True, seed=1), write_checkpoint(sidecars=True, seed=2)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    require_refused(StorageError, "no finished result of `consolidate`", written.folder, out)
    assert (out / "thesis.txt").read_text() == "mine"
    consolidate(other.folder, tmp_path / "others")
    require_refused(StorageError, "holds other weights", written.folder, tmp_path / "others")


def test_too_little_disk_space_is_refused_before_anything_is_written(
    write_checkpoint: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    require_refused(StorageError, "out: .* has 1\\.0 MB free, but", write_checkpoint().folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("call", "code", "error", "match"),
    [
        ("preadv", 5, Unreadable, r"_states\.pt cannot be read now \(Input/output error\): check the disk"),
        ("pwrite", 5, StorageError, "out cannot be written: .*Input/output error"),
        ("posix_fallocate", 28, StorageError, "No space left"),
    ],
)
def test_a_disk_error_is_reported_and_leaves_no_files(
    write_checkpoint: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    call: str, code: int, error: type[T5TrainError], match: str,
) -> None:  # fmt: skip
    def fail(*_arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    written = write_checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", fail)
        require_refused(error, match, written.folder, tmp_path / "out")


def test_leftovers_of_a_killed_consolidation_are_removed(write_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    consolidate(write_checkpoint().folder, tmp_path / "out").verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint0", "out"]


def test_a_folder_that_is_missing_or_holds_no_checkpoint_is_refused(tag: Path, tmp_path: Path) -> None:
    require_refused(InputError, "is not a folder", tmp_path / "nothing", tmp_path / "out")
    require_refused(InputError, "holds no checkpoint", tag, tmp_path / "out")


def test_a_tag_removed_by_a_run_during_consolidation_is_reported(
    write_checkpoint: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_and_remove_tag(*arguments: Any) -> Any:
        plan = plan_of(*arguments)
        shutil.rmtree(written.tag)
        return plan

    written, plan_of = write_checkpoint(sidecars=True), consolidation.plan_of
    monkeypatch.setattr(consolidation, "plan_of", plan_and_remove_tag)
    removed = "removed while .* was read: a run in training"
    require_refused(IncompleteCheckpoint, removed, written.folder, tmp_path / "out")


def test_an_output_folder_that_cannot_be_created_is_named(write_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file cannot be created: .*File exists; .*use another path"):
        consolidate(write_checkpoint().folder, tmp_path / "file" / "out")


def test_zero_0_frozen_parameters_without_sidecars_are_refused_with_element_counts(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written = write_checkpoint(stage=0, **ONE, frozen=[(2, 2)])
    counts = "masters have 15 elements, and the module.s parameters have 19"
    require_refused(UnknownLayout, counts, written.folder, tmp_path / "out")


def test_module_entries_that_are_not_tensors_are_skipped_and_named_in_the_log(
    write_checkpoint: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = write_checkpoint()
    change_model(written.tag, lambda model: model["module"].update({"layer0._extra_state": {"scale": 1.0}}))
    consolidate(written.folder, tmp_path / "out")
    assert "because they are not tensors: layer0._extra_state" in caplog.text
