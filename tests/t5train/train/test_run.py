"""What a run's folder lets the next attempt begin from."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from t5train import sidecar
from t5train.errors import RunChanged, SpecError
from t5train.recipes import recipe
from t5train.records import TokenShards, digest_file
from t5train.sidecar import DataState, ParallelLayout, Sidecar
from t5train.spec import RunSpec
from t5train.start_from import start_fingerprint
from t5train.train import checkpointing
from t5train.train.job import TrainJob, tag_of
from t5train.train.relayout import discard_consolidated
from t5train.train.run import open_run, require_same_settings, run_fingerprint, write_job


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(tmp_path), "name": "run"})


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return TokenShards(path=tmp_path / "shards", fingerprint="5" * 64, files={})


def _checkpoint(spec: RunSpec, step: int, fingerprint: str, content: bytes = b"state") -> Path:
    """A complete checkpoint of two ranks, as far as its sidecars can tell."""
    folder = spec.run_folder / "checkpoints" / tag_of(step)
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").write_bytes(content)
    for rank in range(2):
        one = Sidecar(
            run_fingerprint=fingerprint,
            step=step,
            tag=tag_of(step),
            rank=rank,
            world_size=2,
            layout=ParallelLayout(zero_stage=1, precision="fp32", data_parallel_rank=rank, data_parallel_size=2),
            files={path.name: digest_file(path) for path in folder.glob("*.pt")} if rank == 0 else {},
            groups=[],
            huggingface_config={},
            data=DataState(samples_consumed=step, shards_fingerprint="5" * 64),
        )
        sidecar.write(folder, one)
    return folder


def test_a_checkpoint_of_another_run_is_never_resumed(spec: RunSpec, shards: TokenShards, tmp_path: Path) -> None:
    own = run_fingerprint(spec, shards)
    _checkpoint(spec, 100, own)
    assert TrainJob.read(write_job(spec, shards, tmp_path)).resume_tag == tag_of(100)
    foreign = _checkpoint(spec, 200, run_fingerprint(spec.with_settings({"optimizer.seed": 1}), shards))
    with pytest.raises(RunChanged, match="step-00000200 is a checkpoint of another run"):
        write_job(spec, shards, tmp_path)
    assert foreign.exists()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"spec": {"layouu": {}}, "identity": 3}', b'{"spec": 1}', b"\xff"])
def test_a_damaged_run_file_is_named(spec: RunSpec, shards: TokenShards, damage: bytes) -> None:
    spec.run_folder.mkdir(parents=True)
    (spec.run_folder / "run.json").write_bytes(damage)
    for look in (lambda: require_same_settings(spec), lambda: open_run(spec, shards)):
        with pytest.raises(SpecError, match=r"run\.json cannot be read"):
            look()


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    spec: RunSpec, shards: TokenShards, tmp_path: Path
) -> None:
    own = run_fingerprint(spec, shards)
    _checkpoint(spec, 100, own)
    newest = _checkpoint(spec, 200, own)
    (newest / "mp_rank_00_model_states.pt").write_bytes(b"stats")
    assert TrainJob.read(write_job(spec, shards, tmp_path)).resume_tag == tag_of(100)


@pytest.mark.parametrize(("name", "content"), [("mp_rank_00_model_states.pt", b"st"), ("rank-00001.json", b"{")])
def test_a_checkpoint_that_was_cut_off_is_passed_over_with_a_warning(
    spec: RunSpec,
    shards: TokenShards,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes,
) -> None:
    (_checkpoint(spec, 100, run_fingerprint(spec, shards)) / name).write_bytes(content)
    assert TrainJob.read(write_job(spec, shards, tmp_path)).resume_tag is None
    passed_over, anew = (record.getMessage() for record in caplog.records)
    assert passed_over.startswith("step-00000100 is passed over")
    assert name in passed_over
    assert anew.endswith("checkpoints is whole: run begins anew")


def test_pruning_removes_old_and_unfinished_checkpoints_and_what_was_consolidated_and_nobodys_copies(
    spec: RunSpec, shards: TokenShards, tmp_path: Path
) -> None:
    own = run_fingerprint(spec, shards)
    tags = [_checkpoint(spec, step, own) for step in (1, 2, 3)]
    (tags[0].with_name("removed-0123abcd")).mkdir()
    tags[2].joinpath("rank-00001.json").unlink()
    copies = [tags[0].with_name(name) for name in ("step-00000001-good", "notes")]
    for copy in copies:
        copy.mkdir()
        (copy / "mp_rank_00_model_states.pt").write_bytes(b"mine")
    _checkpoint(spec, 4, own)
    (spec.run_folder / "relayout/step-00000003-0123456789ab").mkdir(parents=True)
    job = TrainJob(
        spec=spec,
        run_fingerprint=own,
        run_folder=spec.run_folder,
        shards_folder=tmp_path,
        resume_tag=None,
    )
    with mock.patch.object(checkpointing, "rank", return_value=0):
        checkpointing.prune(job, 4)
    left = sorted(path.name for path in (spec.run_folder / "checkpoints").iterdir())
    assert left == ["notes", "step-00000001-good", tag_of(2), tag_of(4)]
    assert not (spec.run_folder / "relayout").exists()


def _model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_heads": 4, "num_layers": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=256, **sizes)).save_pretrained(folder)


def test_a_run_is_of_the_weights_it_began_with_and_not_of_their_folder(
    spec: RunSpec, shards: TokenShards, tmp_path: Path
) -> None:
    _model(tmp_path / "here", seed=1)
    (tmp_path / "here").rename(tmp_path / "there")
    _model(tmp_path / "here", seed=2)
    _model(tmp_path / "again", seed=1)
    shards = shards.model_copy(update={"counts": {"vocab_size": 200}, "inputs": {"vocabulary": "6" * 64}})
    here, there, again = (
        spec.with_settings({"model.version": "v1.0", "model.start_from": str(tmp_path / name)})
        for name in ("here", "there", "again")
    )
    open_run(there, shards)
    open_run(again, shards)
    assert TrainJob.read(write_job(again, shards, tmp_path)).start_fingerprint == start_fingerprint(there.model)
    with pytest.raises(RunChanged, match=r"start_from: \"[0-9a-f]{64}\" -> \"[0-9a-f]{64}\""):
        open_run(here, shards)
    with pytest.raises(RunChanged, match=r"start_from: \"given\" -> null"):
        open_run(spec.with_settings({"model.version": "v1.0"}), shards)


def test_a_model_that_does_not_fit_its_tokens_begins_no_run(spec: RunSpec, shards: TokenShards, tmp_path: Path) -> None:
    _model(tmp_path / "model", seed=1)
    shards = shards.model_copy(update={"counts": {"vocab_size": 300}, "inputs": {"vocabulary": "6" * 64}})
    starting = spec.with_settings({"model.version": "v1.0", "model.start_from": str(tmp_path / "model")})
    with pytest.raises(SpecError, match="with a vocabulary of 256, and the tokenizer has 300 ids"):
        open_run(starting, shards)
    assert not starting.run_folder.exists()


def test_what_a_killed_removal_left_of_a_consolidated_checkpoint_goes_with_the_next(spec: RunSpec) -> None:
    left = spec.run_folder / ".relayout.discarded"
    left.mkdir(parents=True)
    (left / "exp_avg.safetensors").write_bytes(b"half of it")
    discard_consolidated(spec.run_folder)
    assert [*spec.run_folder.iterdir()] == []
