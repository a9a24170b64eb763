"""Damaged weights and exports are made again from the checkpoint. Other files are left alone."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from t5train.errors import StorageError
from t5train.records.stage_records import Checkpoint, Export, TokenizerFiles, Weights
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tasks import stage_tasks

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda _content: b"",
    "flipped": lambda content: content.replace(b"FP32", b"FP23").replace(b'"step": 5', b'"step": 4'),
}


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(tmp_path), "name": "mine"})


@pytest.fixture
def checkpoint(spec: RunSpec) -> Checkpoint:
    """A checkpoint of one rank without sidecars, the smallest that can be consolidated."""
    tag = spec.run_folder / "checkpoints/step-00000005"
    tag.mkdir(parents=True)
    torch.save(
        {"module": {"shared.weight": torch.ones(3, 2)}, "optimizer": None, "global_steps": 5},
        tag / "mp_rank_00_model_states.pt",
    )
    return Checkpoint(path=spec.run_folder, fingerprint="c" * 64, files={}, step=5, tag=tag.name)


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_with_a_damaged_manifest_are_made_again_and_the_log_says_so(
    spec: RunSpec, checkpoint: Checkpoint, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = stage_tasks.consolidate_weights.fn(spec, checkpoint)
    manifest = made.path / "manifest.json"
    manifest.write_bytes(DAMAGES[damage](manifest.read_bytes()))
    with caplog.at_level(logging.WARNING):
        again = stage_tasks.consolidate_weights.fn(spec, checkpoint)
    assert not again.reused
    assert again.files == made.files
    assert f"{manifest} {'was altered' if damage == 'flipped' else 'is damaged'}" in caplog.text
    aside = made.path.with_name(f"{made.path.name}.aside-1")
    assert f"the folder was moved to {aside} and will be made again" in caplog.text
    assert Weights.load(made.path).fingerprint == made.fingerprint
    assert sorted(made.path.parent.iterdir()) == [made.path, aside]
    assert stage_tasks.consolidate_weights.fn(spec, checkpoint).reused


def test_an_export_with_a_damaged_manifest_is_moved_aside_before_it_is_made_again(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = spec.run_folder / "export"
    out.mkdir(parents=True)
    manifest = Export(path=out, fingerprint="e" * 64, files={}).commit().manifest_text().encode()
    found: list[bool] = []
    monkeypatch.setattr(stage_tasks, "export", lambda *_arguments: found.append(out.exists()))
    for damage in DAMAGES.values():
        out.mkdir(exist_ok=True)
        (out / "manifest.json").write_bytes(damage(manifest).replace(b"e" * 64, b"f" * 64))
        stage_tasks.export_model.fn(spec, cast(Weights, None), cast(TokenizerFiles, None))
    assert found == [False] * len(DAMAGES)


@pytest.mark.parametrize(("task", "build"), [("make_corpus", "build_corpus"), ("make_pairs", "build_pairs")])
def test_weights_to_start_from_are_there_before_data_is_made(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, task: str, build: str
) -> None:
    called: list[str] = []
    for name in ("complete_start", build):
        monkeypatch.setattr(stage_tasks, name, lambda *_arguments, name=name: called.append(name))
    getattr(stage_tasks, task).fn(spec)
    assert called == ["complete_start", build]


@pytest.mark.parametrize("names", [["thesis.txt"], ["thesis.txt", "manifest.json"]])
def test_a_folder_that_is_not_a_damaged_result_is_left_alone(
    spec: RunSpec, checkpoint: Checkpoint, names: list[str]
) -> None:
    made = stage_tasks.consolidate_weights.fn(spec, checkpoint)
    for path in made.path.iterdir():
        path.unlink()
    (made.path / "thesis.txt").write_text("mine")
    if "manifest.json" in names:
        Export(path=made.path, fingerprint="e" * 64, files={}).commit()
    with pytest.raises(StorageError, match="no finished result of `consolidate`"):
        stage_tasks.consolidate_weights.fn(spec, checkpoint)
    assert sorted(path.name for path in made.path.iterdir()) == sorted(names)


def test_a_disk_error_fails_a_task_with_one_line_that_names_path_and_remedy(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Address 0 of this process is not mapped, so reading it fails with EIO.
    monkeypatch.setattr(stage_tasks, "certify_in_fresh_process", lambda *_: Path("/proc/self/mem").read_bytes())
    with pytest.raises(StorageError, match=r"^/proc/self/mem: Input/output error; the disk or its connection fails: "):
        stage_tasks.certify_export.fn(spec, cast(Weights, None), cast(Export, None))
