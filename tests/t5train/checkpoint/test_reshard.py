"""Continuing a run in another layout: from two ranks to four, and back."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint import resume as run_module
from t5train.checkpoint.consolidate import consolidate
from t5train.checkpoint.sidecar import read_all
from t5train.engine.collectives import digest64
from t5train.errors import StorageError
from t5train.records.metrics import read
from t5train.records.stage_records import TokenShards
from t5train.spec import RunSpec
from t5train.spec.rank_job import TrainJob
from tests.support.training.launched import Trained, spec_of, train

pytestmark = pytest.mark.slow

PAIRS = {  # layout of two ranks: layout of four ranks
    "zero2-fp32-offload": "zero1-fp32",
    "zero1-bf16": "zero2-bf16",
    "zero3-bf16-offload": "zero0-bf16",
    "zero2-fp32-ep2": "zero1-fp32-ep4",
    "zero2-bf16-ep1": "zero2-bf16-ep2-offload",
    "zero2-fp32": "zero1-fp32-pp2",
    "zero1-fp32-pp2": "zero3-fp32",
    "zero1-bf16-pp2-tied": "zero1-bf16-pp4-tied",
}
if torch.ops.mkldnn._is_mkldnn_fp16_supported():
    PAIRS |= {"zero2-fp16": "zero3-fp16", "zero3-fp16": "zero1-fp16"}
# Initial loss scales, as powers of two, at which fp16 skips some or all of the first three steps. With one pass a step,
# the largest gradient is 0.3 to 0.4 on any number of ranks: it overflows at 2^18, and does not at 2^17.
SCALES = {"zero2-fp16": 18, "zero3-fp16": 21}
SKIPPED = {"zero2-fp16": 2, "zero3-fp16": 3}
TAG = "step-00000003"
FILES = ("model", "exp_avg", "exp_avg_sq")


def _job(root: Path, name: str, layout: str, ranks: int, **more: Any) -> dict[str, Any]:
    pair, _ = name.split(".")
    # Nothing is random: there is no dropout, and experts have the capacity for all tokens.
    settings: dict[str, Any] = {"model.dropout_rate": 0.0, "model.moe.capacity_factor": 4.0}
    if pair in SCALES:
        settings |= {"optimizer.initial_scale_power": SCALES[pair], "layout.micro_batch_sequences": 16 // ranks}
    spec = spec_of(layout, num_steps=6, ranks=ranks, saved_every=3).with_settings(settings)
    return {"name": name, "spec": spec.model_dump(mode="json"), "run_folder": f"{root}/runs/{name}", **more}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> Trained:
    """Every pair: two ranks to the end, four from the two's checkpoint of step 3, and two again from the four's."""
    root = tmp_path_factory.mktemp("relayout")
    launches: list[tuple[int, list[dict[str, Any]]]] = [(2, []), (4, []), (2, [])]
    for layout, other in PAIRS.items():
        runs = root / "runs"
        launches[0][1].append(_job(root, f"{layout}.whole", layout, 2))
        from_two, from_four = (
            {"other_layout": f"{runs}/{layout}.{run}", "other_tag": TAG} for run in ("whole", "other")
        )
        launches[1][1].append(_job(root, f"{layout}.other", other, 4, **from_two))
        launches[2][1].append(_job(root, f"{layout}.back", layout, 2, **from_four))
    for ranks, jobs in launches:
        train(root, jobs, pydocs_shards, ranks)
    return Trained(root)


@pytest.mark.parametrize("layout", PAIRS)
def test_resharding_keeps_masters_and_moments_bit_for_bit(trained: Trained, layout: str, tmp_path: Path) -> None:
    runs = trained.root / "runs"
    again = tmp_path / "again"
    consolidated = Path(json.loads((runs / f"{layout}.whole/told.json").read_text())["folder"])
    moments = SKIPPED.get(layout) != 3
    consolidate(runs / f"{layout}.other/checkpoints", again, tag=TAG, moments=moments)
    names = FILES if moments else FILES[:1]
    before, after = ([load_file(folder / f"{name}.safetensors") for name in names] for folder in (consolidated, again))
    for first, second in zip(before, after, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    live = {name: digest64(tensor.numpy().tobytes()) for name, tensor in before[0].items()}
    assert all(trained.found(f"{layout}.other", rank)["begun"] == live for rank in range(4))


@pytest.mark.parametrize("layout", PAIRS)
def test_a_resharded_run_continues_and_back_again_ends_bit_identical_to_one_never_resharded(
    trained: Trained, layout: str
) -> None:
    runs = trained.root / "runs"
    before, after = (read_all(runs / f"{layout}.{run}/checkpoints/{TAG}")[0] for run in ("whole", "other"))
    for what in ("step", "skipped_steps", "loss_scaler", "data"):
        assert getattr(before, what) == getattr(after, what)
    assert before.skipped_steps == SKIPPED.get(layout, 0)
    whole, other = (read(runs / f"{layout}.{name}/metrics.jsonl") for name in ("whole", "other"))
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (whole, other)]
    assert losses[1] == pytest.approx(losses[0][3:], rel=1e-6 if "fp32" in layout else 1e-3), "up to rounding"
    ended, back = trained.found(f"{layout}.whole"), trained.found(f"{layout}.back")
    assert ended["step"] == back["step"] == 6
    assert ended["masters"] == back["masters"]


@pytest.fixture
def run(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run that was killed after step 3, as its head finds it."""
    checkpoints = Path("checkpoints", TAG)
    shutil.copytree(trained.root / "runs/zero1-bf16.whole" / checkpoints, tmp_path / "runs/run" / checkpoints)
    monkeypatch.setattr(run_module, "run_fingerprint", lambda _spec, _shards: "0" * 64)
    return spec_of("zero1-bf16", num_steps=6, saved_every=3).with_settings(
        {"storage.root": str(tmp_path), "name": "run"}
    )


def _train_job(spec: RunSpec, shards: TokenShards, tmp_path: Path) -> TrainJob:
    return TrainJob.read(run_module.write_job(spec, shards, tmp_path))


def test_a_checkpoint_of_another_layout_is_consolidated_once_and_again_if_damaged(
    run: RunSpec, pydocs_shards: TokenShards, tmp_path: Path
) -> None:
    other = run.with_settings({"layout.zero_stage": 3})
    first = _train_job(other, pydocs_shards, tmp_path)
    assert first.resume_tag is None
    assert first.consolidated.clock.optimizer_steps == 3
    model = first.consolidated.folder / "model.safetensors"
    made = model.stat()
    assert _train_job(other, pydocs_shards, tmp_path) == first  # as after a kill before the new layout saved
    assert model.stat().st_ino == made.st_ino
    content = model.read_bytes()
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert _train_job(other.with_settings({"cluster.ranks": 4}), pydocs_shards, tmp_path) != first
    assert model.read_bytes() == content


def test_consolidated_files_are_removed_once_the_newest_checkpoint_has_the_requested_layout(
    run: RunSpec, pydocs_shards: TokenShards, tmp_path: Path, trained: Trained
) -> None:
    other = run.with_settings({"layout.zero_stage": 2, "cluster.ranks": 4})
    assert _train_job(other, pydocs_shards, tmp_path).consolidated is not None
    newest = run.run_folder / "checkpoints/step-00000006"
    shutil.copytree(trained.root / "runs/zero1-bf16.other/checkpoints/step-00000006", newest)
    again = _train_job(other, pydocs_shards, tmp_path)
    assert (again.resume_tag, again.consolidated) == ("step-00000006", None)
    assert not (run.run_folder / "relayout").exists()
    back = _train_job(run, pydocs_shards, tmp_path).consolidated
    assert back.clock.step == 6
    (newest / "rank-00003.json").unlink()
    assert _train_job(run, pydocs_shards, tmp_path).resume_tag == TAG


def test_resharding_without_enough_disk_space_is_refused_before_anything_is_written(
    run: RunSpec, pydocs_shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1))
    with pytest.raises(StorageError, match="for consolidating step-00000003 of run 'run' and saving the next one: "):
        _train_job(run.with_settings({"layout.zero_stage": 2}), pydocs_shards, tmp_path)
    assert not (run.run_folder / "relayout").exists()
