"""Which checkpoint in a run's folder the next attempt begins from."""

import json
import resource
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest

from t5train.checkpoint import resume_point, saving, sidecar
from t5train.checkpoint.reshard import discard_consolidated
from t5train.checkpoint.resume import (
    open_run,
    require_same_settings,
    run_fingerprint,
    write_job,
)
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.errors import InputError, NothingVerifies, RunChanged, SpecError, UnknownVersion, UnlistedFile, Unreadable
from t5train.files.run_folder import tag_of
from t5train.records.digests import digest_file
from t5train.records.identity import fingerprint
from t5train.records.stage_records import PairShards, TokenShards
from t5train.spec import RunSpec
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe

MODEL = "mp_rank_00_model_states.pt"
Save = Callable[[int], Path]
Begin = Callable[[], TrainJob]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(tmp_path), "name": "run"})


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return TokenShards(path=tmp_path / "shards", fingerprint="5" * 64, files={})


@pytest.fixture
def save(spec: RunSpec, shards: TokenShards) -> Callable[[int], Path]:
    """Writes a checkpoint of the run at a step."""
    return lambda step: _checkpoint(spec, step, run_fingerprint(spec, shards))


@pytest.fixture
def begin(spec: RunSpec, shards: TokenShards, tmp_path: Path) -> Callable[[], TrainJob]:
    """Prepares the run's next attempt, and returns what its ranks do."""
    return lambda: TrainJob.read(write_job(spec, shards, tmp_path))


def test_the_ranks_of_a_run_on_pairs_load_pair_shards(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shards = PairShards(path=tmp_path / "shards", fingerprint="6" * 64, files={}).commit()
    tuned = spec.with_settings({"pairs.train": ["a.jsonl"]})
    open_run(tuned, shards)
    assert TrainJob.read(write_job(tuned, shards, tmp_path)).shards() == shards


def test_ranks_that_generate_text_get_the_vocabulary_of_the_shards_and_no_other(spec: RunSpec, tmp_path: Path) -> None:
    for name, content in (("old", b"old"), ("new", b"new")):
        (tmp_path / "tokenizer" / name).mkdir(parents=True)
        (tmp_path / "tokenizer" / name / "spiece.model").write_bytes(content)
    shards = PairShards(
        path=tmp_path, fingerprint="6" * 64, files={}, inputs={"vocabulary": sha256(b"new").hexdigest()}
    )
    tuned = spec.with_settings({"pairs.train": ["a.jsonl"], "evaluate.best_metric": "validation_chrf"})
    open_run(tuned, shards)
    assert TrainJob.read(write_job(tuned, shards, tmp_path)).vocabulary == b"new"
    (tmp_path / "tokenizer/new/spiece.model").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"lacks the vocabulary of the shards, with which evaluate\.best_metric reads"):
        write_job(tuned, shards, tmp_path)


def _checkpoint(spec: RunSpec, step: int, fingerprint: str) -> Path:
    """A checkpoint of two ranks that is complete according to its sidecars."""
    folder = spec.run_folder / "checkpoints" / tag_of(step)
    folder.mkdir(parents=True)
    (folder / MODEL).write_bytes(b"state")
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


def test_a_checkpoint_of_another_run_is_never_resumed(spec: RunSpec, shards: TokenShards, begin: Begin) -> None:
    own = run_fingerprint(spec, shards)
    _checkpoint(spec, 100, own)
    assert begin().resume_tag == tag_of(100)
    foreign = _checkpoint(spec, 200, run_fingerprint(spec.with_settings({"optimizer.seed": 1}), shards))
    with pytest.raises(RunChanged, match="step-00000200 is a checkpoint of another run"):
        begin()
    assert foreign.exists()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"spec": {"layouu": {}}, "identity": 3}', b'{"spec": 1}', b"\xff"])
def test_a_damaged_run_file_is_named(spec: RunSpec, shards: TokenShards, damage: bytes) -> None:
    spec.run_folder.mkdir(parents=True)
    (spec.run_folder / "run.json").write_bytes(damage)
    for look in (lambda: require_same_settings(spec), lambda: open_run(spec, shards)):
        with pytest.raises(SpecError, match=r"run\.json is damaged"):
            look()


def test_a_run_resumes_from_the_previous_checkpoint_if_the_newest_is_damaged(save: Save, begin: Begin) -> None:
    save(100)
    newest = save(200)
    (newest / MODEL).write_bytes(b"stats")
    assert begin().resume_tag == tag_of(100)


def _make_unreadable(path: Path) -> None:
    """Replace a file by a link to itself, which the operating system reports as unreadable, not as absent."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [MODEL, "rank-00001.json"])
def test_an_unreadable_file_stops_the_start_and_no_checkpoint_is_lost(
    spec: RunSpec, save: Save, begin: Begin, name: str
) -> None:
    save(100)
    newest = save(200)
    content = (newest / name).read_bytes()
    _make_unreadable(newest / name)
    before = _contents(spec.run_folder)
    with pytest.raises(Unreadable, match=rf"{tag_of(200)}/{name} cannot be read now \(Too many levels"):
        begin()
    assert _contents(spec.run_folder) == before
    (newest / name).unlink()
    (newest / name).write_bytes(content)
    assert begin().resume_tag == tag_of(200)


def test_checkpoints_do_not_count_as_damaged_if_file_descriptors_run_out(save: Save, begin: Begin) -> None:
    save(100)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(Unreadable, match=r"Too many open files\): raise the limit of open files"):
            begin()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert begin().resume_tag == tag_of(100)


def test_an_unreadable_checkpoints_folder_is_refused_and_not_taken_for_empty(spec: RunSpec, begin: Begin) -> None:
    spec.run_folder.mkdir(parents=True)
    _make_unreadable(spec.run_folder / "checkpoints")
    with pytest.raises(Unreadable, match="checkpoints cannot be read now"):
        begin()


@pytest.mark.parametrize(
    ("change", "words"), [({"schema_version": 2}, "schema_version 2"), ({"tensor_parallel": 4}, "tensor_parallel")]
)
def test_a_sidecar_of_another_version_stops_the_start(
    save: Save, begin: Begin, change: dict[str, object], words: str
) -> None:
    save(100)
    path = save(200) / "rank-00001.json"
    document = json.loads(path.read_text()) | change
    del document["sha256"]
    path.write_text(json.dumps(document | {"sha256": fingerprint(document)}))
    with pytest.raises(UnknownVersion, match=rf"{path.name} is intact, .* know its {words}\. Use the version"):
        begin()


def test_a_checkpoint_with_a_file_that_no_rank_recorded_is_refused_and_not_skipped(
    spec: RunSpec, save: Save, begin: Begin
) -> None:
    save(100)
    (save(200) / "mp_rank_01_model_states.pt").write_bytes(b"stray")
    before = _contents(spec.run_folder)
    with pytest.raises(UnlistedFile, match=r"holds mp_rank_01_model_states\.pt, a file that no rank recorded"):
        begin()
    assert _contents(spec.run_folder) == before


@pytest.mark.parametrize(("name", "content"), [(MODEL, b"st"), (MODEL, b"stats"), ("rank-00001.json", b"{")])
def test_a_run_whose_only_checkpoint_is_damaged_begins_again_only_when_asked_to(
    spec: RunSpec, shards: TokenShards, save: Save, begin: Begin, name: str, content: bytes
) -> None:
    open_run(spec, shards)
    (save(100) / name).write_bytes(content)
    kept = _contents(spec.run_folder / "checkpoints" / tag_of(100))
    with pytest.raises(NothingVerifies, match=rf"(?s){name}.*begin at step 0 with --begin-again"):
        begin()
    ask_to_begin_again(spec.run_folder)
    assert begin().resume_tag is None
    (aside,) = (spec.run_folder / "set-aside").iterdir()
    assert _contents(aside) == kept
    assert begin().resume_tag is None, "one request must start the run over only once"
    save(100)
    assert begin().resume_tag == tag_of(100)


def test_a_run_with_a_checkpoint_that_cannot_be_read_can_begin_again(spec: RunSpec, save: Save, begin: Begin) -> None:
    _make_unreadable(save(100) / "rank-00001.json")
    with pytest.raises(Unreadable):
        begin()
    ask_to_begin_again(spec.run_folder)
    assert begin().resume_tag is None
    (aside,) = (spec.run_folder / "set-aside").iterdir()
    assert (aside / "rank-00001.json").is_symlink()


def test_a_run_whose_checkpoints_are_gone_does_not_quietly_begin_again(save: Save, begin: Begin) -> None:
    only = save(100)
    begin()
    shutil.rmtree(only)
    with pytest.raises(NothingVerifies, match=rf"{tag_of(100)}, which was complete at \S+, is missing"):
        begin()


@pytest.mark.parametrize("lost", [["rank-00000.json", "rank-00001.json"], ["rank-00001.json"]])
def test_a_run_that_was_killed_in_its_first_save_begins_at_step_0(
    spec: RunSpec, save: Save, begin: Begin, lost: list[str]
) -> None:
    folder = save(100)
    for name in lost:
        (folder / name).unlink()
    assert begin().resume_tag is None
    resume_point.note_complete(spec.run_folder, tag_of(100))
    with pytest.raises(NothingVerifies, match=r"rank-0000\d\.json"):
        begin()


def test_damaged_checkpoints_newer_than_the_one_resumed_from_are_set_aside(
    spec: RunSpec, save: Save, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (100, 200, 300, 400):
        save(step)
    resume_point.note_complete(spec.run_folder, tag_of(300))
    checkpoints = spec.run_folder / "checkpoints"
    (checkpoints / tag_of(200) / MODEL).write_bytes(b"stats")
    for step in (300, 400):  # the first was complete, the second never
        (checkpoints / tag_of(step) / "rank-00000.json").unlink()
    kept = [_contents(checkpoints / tag_of(step)) for step in (200, 300)]
    assert begin().resume_tag == tag_of(100)
    assert f"but no longer is: resuming from {tag_of(100)}" in caplog.text
    assert sorted(path.name for path in checkpoints.iterdir()) == [tag_of(100), tag_of(400)]
    aside = sorted((spec.run_folder / "set-aside").iterdir())
    assert [_contents(folder) for folder in aside] == kept
    assert all(f"was moved to {folder}: it is damaged and newer than {tag_of(100)}" in caplog.text for folder in aside)


def _prune(spec: RunSpec, shards: TokenShards, resumed: str | None, newest_step: int) -> list[str]:
    own, folder = run_fingerprint(spec, shards), spec.run_folder
    job = TrainJob(spec=spec, run_fingerprint=own, run_folder=folder, shards_folder=folder, resume_tag=resumed)
    with mock.patch.object(saving, "rank", return_value=0):
        saving.prune(job, newest_step)
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_pruning_never_deletes_a_checkpoint_newer_than_the_one_training_resumed_from(
    spec: RunSpec, shards: TokenShards, save: Save
) -> None:
    for step in (100, 150, 200):
        save(step)
    kept = _contents(spec.run_folder / "checkpoints" / tag_of(200))
    left = _prune(spec.with_settings({"storage.keep_last": 1}), shards, tag_of(100), 150)
    assert left == [tag_of(150)]
    (aside,) = (spec.run_folder / "set-aside").iterdir()
    assert _contents(aside) == kept


def test_pruning_removes_nothing_while_a_checkpoint_cannot_be_read(
    spec: RunSpec, shards: TokenShards, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    tags = [save(step) for step in (1, 2, 3, 4)]
    _make_unreadable(tags[1] / MODEL)
    assert _prune(spec, shards, None, 4) == [tag_of(step) for step in (1, 2, 3, 4)]
    assert f"{tag_of(2)}/{MODEL} cannot be read now" in caplog.text


def test_pruning_removes_nothing_while_files_of_other_hosts_cannot_be_seen(
    spec: RunSpec, shards: TokenShards, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    tags = [save(step) for step in (1, 2, 3, 4)]
    tags[3].joinpath("rank-00001.json").unlink()
    assert _prune(spec, shards, None, 4) == [tag_of(step) for step in (1, 2, 3, 4)]
    assert f"{tag_of(4)} was saved, but not all of it can be seen here yet" in caplog.text


def test_pruning_removes_old_unfinished_and_consolidated_checkpoints_but_no_user_copies(
    spec: RunSpec, shards: TokenShards, save: Save
) -> None:
    tags = [save(step) for step in (1, 2, 3)]
    tags[0].with_name("removed-0123abcd").mkdir()
    tags[2].joinpath("rank-00001.json").unlink()
    for name in ("step-00000001-good", "notes"):
        tags[0].with_name(name).mkdir()
        (tags[0].with_name(name) / MODEL).write_bytes(b"mine")
    save(4)
    (spec.run_folder / "relayout/step-00000003-0123456789ab").mkdir(parents=True)
    assert _prune(spec, shards, None, 4) == ["notes", "step-00000001-good", tag_of(2), tag_of(4)]
    assert not (spec.run_folder / "relayout").exists()


def _begun_by_an_earlier_version(spec: RunSpec, shards: TokenShards) -> str:
    """Write the run file without the rule of weight decay, which earlier versions did not record."""
    path = spec.run_folder / "run.json"
    open_run(spec, shards)
    begun = json.loads(path.read_text())
    begun["identity"].pop("decayed", None)
    begun["fingerprint"] = fingerprint(begun["identity"])
    path.write_text(json.dumps(begun))
    return str(begun["fingerprint"])


def test_a_run_keeps_the_rule_of_weight_decay_that_it_began_with(
    spec: RunSpec, shards: TokenShards, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decayed = spec.with_settings({"optimizer.weight_decay": 0.1})
    earlier = _begun_by_an_earlier_version(decayed, shards)
    _checkpoint(decayed, 100, earlier)
    open_run(decayed, shards)
    require_same_settings(decayed)
    assert "weight decay" not in caplog.text, "a finished run is only opened"
    job = TrainJob.read(write_job(decayed, shards, tmp_path))
    assert (job.resume_tag, job.run_fingerprint, job.decays_all) == (tag_of(100), earlier, True)
    assert "its weight decay (0.1) also shrinks norms and position biases. It keeps this rule" in caplog.text

    new = decayed.with_settings({"name": "new"})
    open_run(new, shards)
    job = TrainJob.read(write_job(new, shards, tmp_path))
    assert job.run_fingerprint == run_fingerprint(new, shards) != earlier
    assert not job.decays_all


def test_without_weight_decay_a_run_has_the_fingerprint_that_earlier_versions_gave_it(
    spec: RunSpec, shards: TokenShards, begin: Begin
) -> None:
    assert _begun_by_an_earlier_version(spec, shards) == run_fingerprint(spec, shards)
    assert not begin().decays_all


def test_leftovers_of_a_killed_removal_are_deleted_by_the_next_one(spec: RunSpec) -> None:
    left = spec.run_folder / ".relayout.discarded"
    left.mkdir(parents=True)
    (left / "exp_avg.safetensors").write_bytes(b"half of it")
    discard_consolidated(spec.run_folder)
    assert [*spec.run_folder.iterdir()] == []
