"""Checkpoints that must not be consolidated are refused, and a refusal leaves no files behind."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate, consolidation, torch_file
from t5train.checkpoint.consolidate import consolidation as out_folder
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


def refuse(error: type[T5TrainError], match: str, checkpoint: Path, out: Path, **how: Any) -> None:
    before = sorted(out.parent.iterdir())
    with pytest.raises(error, match=match):
        consolidate(checkpoint, out, **how)
    assert sorted(out.parent.iterdir()) == before


def test_a_flipped_bit_in_somebody_elses_files_is_refused_or_changes_nothing(
    zero12: Callable[..., Any], tmp_path: Path
) -> None:
    written = zero12(frozen=[(3, 3)], buffers=1)
    refused = 0
    for seed in range(150):
        damaged, out, chance = tmp_path / "damaged", tmp_path / "out", random.Random(seed)
        shutil.copytree(written.tag, damaged)
        path = chance.choice(sorted(damaged.iterdir()))
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
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
def test_a_flipped_bit_of_a_master_that_rounding_hides_is_found(
    zero12: Callable[..., Any], tmp_path: Path, bit: int
) -> None:
    """The lowest bits of a master do not affect its bf16 weight, but the archive's checksum detects a change."""
    written = zero12()
    path = written.tag / RANK1
    master = torch_file.read_metadata(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    content = bytearray(path.read_bytes())
    content[master.offset + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    refuse(IncompleteCheckpoint, rf"{RANK1} is damaged.*CRC-32", written.tag, tmp_path / "out")


def test_a_partition_of_another_step_is_refused_by_the_weights_it_rounds_to(
    zero12: Callable[..., Any], tmp_path: Path
) -> None:
    written, later = zero12(seed=1), zero12(seed=2)
    shutil.copy(later.tag / RANK1, written.tag / RANK1)
    refuse(IncompleteCheckpoint, rf"{RANK1}, rounded to BF16, differs from", written.folder, tmp_path / "out")


def test_a_missing_rank_of_somebody_elses_checkpoint_is_named(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12(ranks=4)
    (written.tag / RANK1).unlink()
    refuse(IncompleteCheckpoint, r"ranks \[1\] are missing", written.folder, tmp_path / "out")


def test_a_truncated_file_of_somebody_elses_checkpoint_is_named(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12()
    content = (written.tag / RANK1).read_bytes()
    (written.tag / RANK1).write_bytes(content[: len(content) // 2])
    refuse(IncompleteCheckpoint, f"{RANK1} is truncated", written.folder, tmp_path / "out")


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_a_hostile_pickle_is_refused_and_does_not_run(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written, target = zero12(), tmp_path / "ran"
    model = torch.load(written.tag / MODEL, weights_only=False)  # a file that this test wrote
    torch.save(model | {"client": Hostile(target)}, written.tag / MODEL)
    refuse(ConsolidationError, f"{MODEL} is not loaded", written.folder, tmp_path / "out")
    assert not target.exists()


def save_model(tag: Path, **changed: Any) -> None:
    model = torch.load(tag / MODEL, weights_only=False)  # a file that this test wrote
    torch.save(model | changed, tag / MODEL)


def test_masters_that_are_not_all_accounted_for_are_refused(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12(groups=[[(5, 3), (40,)]], keep_padding=True)
    save_model(written.tag, param_shapes=[{"layer0.weight0": torch.Size((5, 3))}])
    refuse(ConsolidationError, "the parameters need 15", written.folder, tmp_path / "out")


def test_a_parameter_without_a_weight_in_the_module_is_refused(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12(groups=[[(5, 3)]])
    save_model(written.tag, module={"other": torch.ones(2)})
    refuse(ConsolidationError, r"an fp32 master of layer0\.weight0, but", written.folder, tmp_path / "out")


def test_a_tie_that_is_none_is_refused(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12(groups=[[(5, 3)]])
    module = torch.load(written.tag / MODEL, weights_only=False)["module"]  # a file that this test wrote
    module["alias"] = module["layer0.weight0"] + 1
    save_model(written.tag, module=module, shared_params={"alias": "layer0.weight0"})
    refuse(IncompleteCheckpoint, r"layer0\.weight0: the master", written.folder, tmp_path / "out")


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
def test_a_layout_without_a_rule_is_refused_by_what_it_looks_like(tmp_path: Path, names: list[str], seen: str) -> None:
    tag = tmp_path / "tag"
    tag.mkdir()
    for name in names:
        (tag / name).mkdir() if name.endswith("/") else torch.save({}, tag / name)
    refuse(UnknownLayout, seen, tag, tmp_path / "out")


def test_zero_0_in_bf16_without_masters_is_refused(tmp_path: Path) -> None:
    tag = tmp_path / "tag"
    tag.mkdir()
    torch.save({"module": {"a": torch.ones(3, dtype=torch.bfloat16)}, "optimizer": None}, tag / MODEL)
    refuse(UnknownLayout, "a is BF16 and has no fp32 master", tag, tmp_path / "out")


def test_latest_is_not_believed_blindly(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12()
    for text, message in [("global_step8", "has no tag 'global_step8'"), ("../elsewhere", "not the name of a tag")]:
        (written.folder / "latest").write_text(text)
        refuse(InputError, message, written.folder, tmp_path / "out")
    (written.folder / "latest").unlink()
    refuse(InputError, "no file 'latest'.*global_step7", written.folder, tmp_path / "out")


def test_the_newest_complete_tag_is_taken_whatever_latest_says(zero12: Callable[..., Any], tmp_path: Path) -> None:
    older, newer, broken = (zero12(sidecars=True, step=step, seed=step) for step in (7, 8, 9))
    newer.tag.rename(older.folder / newer.tag.name)
    broken.tag.rename(older.folder / broken.tag.name)
    (older.folder / "global_step9" / RANK1).unlink()
    weights = consolidate(older.folder, tmp_path / "out")
    assert weights.counts["step"] == 8
    assert consolidate(older.folder, tmp_path / "other", tag="global_step7").counts["step"] == 7
    refuse(IncompleteCheckpoint, RANK1, older.folder, tmp_path / "third", tag="global_step9")


def test_when_no_tag_is_complete_none_is_taken(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12(sidecars=True)
    (written.tag / "rank-00000.json").unlink()
    refuse(IncompleteCheckpoint, "no complete tag", written.folder, tmp_path / "out")


@pytest.mark.parametrize("sidecars", [True, False])
def test_the_same_weights_again_are_verified_and_reused(
    zero12: Callable[..., Any], tmp_path: Path, sidecars: bool
) -> None:
    written = zero12(sidecars=sidecars)
    first = consolidate(written.folder, tmp_path / "out")
    inode = (tmp_path / "out" / "model.safetensors").stat().st_ino
    again = consolidate(written.folder, tmp_path / "out")
    assert again.reused
    assert again.fingerprint == first.fingerprint
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == inode


def test_damaged_weights_are_made_again_and_the_damaged_ones_kept(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written = zero12(sidecars=True)
    first = consolidate(written.folder, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"damaged")
    again = consolidate(written.folder, tmp_path / "out")
    assert not again.reused
    assert again.files == first.files
    again.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint0", "out", "out.aside-1"]


def test_a_file_that_somebody_put_beside_damaged_weights_is_not_lost(
    zero12: Callable[..., Any], tmp_path: Path
) -> None:
    written, out = zero12(sidecars=True), tmp_path / "out"
    consolidate(written.folder, out)
    (out / "thesis.txt").write_text("mine")
    assert consolidate(written.folder, out).reused
    (out / "model.safetensors").write_bytes(b"damaged")
    refuse(StorageError, "damaged weights and an unrelated file, thesis.txt", written.folder, out)
    assert (out / "thesis.txt").read_text() == "mine"


def test_a_folder_that_holds_something_else_is_left_alone(zero12: Callable[..., Any], tmp_path: Path) -> None:
    written, other = zero12(sidecars=True, seed=1), zero12(sidecars=True, seed=2)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    refuse(StorageError, "no finished result of `consolidate`", written.folder, out)
    assert (out / "thesis.txt").read_text() == "mine"
    consolidate(other.folder, tmp_path / "others")
    refuse(StorageError, "holds other weights", written.folder, tmp_path / "others")


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    zero12: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1 << 20

    monkeypatch.setattr(out_folder.shutil, "disk_usage", lambda _path: Full)
    refuse(StorageError, "only 1048576 bytes are free", zero12().folder, tmp_path / "out")


def test_nothing_stays_behind_when_writing_fails(
    zero12: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    refuse(StorageError, "No space left", zero12().folder, tmp_path / "out")


def test_what_a_killed_consolidation_left_is_cleared(zero12: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    consolidate(zero12().folder, tmp_path / "out").verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint0", "out"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuse(InputError, "is not a folder", tmp_path / "nothing", tmp_path / "out")
    refuse(InputError, "holds no checkpoint", tmp_path / "empty", tmp_path / "out")


def test_a_tag_that_a_run_removes_meanwhile_is_told(
    zero12: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = zero12(sidecars=True)
    plan_of = consolidation.plan_of

    def plan_and_lose(*arguments: Any) -> Any:
        plan = plan_of(*arguments)
        shutil.rmtree(written.tag)
        return plan

    monkeypatch.setattr(consolidation, "plan_of", plan_and_lose)
    refuse(IncompleteCheckpoint, "removed while .* was read: a run in training", written.folder, tmp_path / "out")


def test_an_output_folder_that_cannot_be_made_is_named(zero12: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file cannot be created: .*File exists; choose another"):
        consolidate(zero12().folder, tmp_path / "file" / "out")


def test_frozen_parameters_at_zero_0_without_sidecars_are_refused_with_the_numbers_seen(
    zero12: Callable[..., Any], tmp_path: Path
) -> None:
    written = zero12(stage=0, groups=[[(5, 3)]], frozen=[(2, 2)])
    refuse(
        UnknownLayout, "masters have 15 elements, and the module's parameters have 19", written.folder, tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ("preadv", Unreadable, r"_states\.pt cannot be read now \(Input/output error\): check the disk"),
        ("pwrite", StorageError, "out cannot be written: .*Input/output error"),
    ],
)
def test_a_bad_disk_is_told_and_nothing_stays_behind(
    zero12: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: type[T5TrainError],
    match: str,
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(5, "Input/output error")

    written = zero12()
    with monkeypatch.context() as bad:
        bad.setattr(f"os.{call}", fail)
        refuse(error, match, written.folder, tmp_path / "out")


def test_what_is_no_tensor_in_a_module_is_named_when_it_is_left_out(
    zero12: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = zero12()
    module = torch.load(written.tag / MODEL, weights_only=False)["module"]  # a file that this test wrote
    save_model(written.tag, module=module | {"layer0._extra_state": {"scale": 1.0}})
    consolidate(written.folder, tmp_path / "out")
    assert "because they are not tensors: layer0._extra_state" in caplog.text
