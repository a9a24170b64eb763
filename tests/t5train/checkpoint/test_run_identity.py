"""A run is known by the weights that it starts with, and by an id of its own."""

import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from t5train.checkpoint.resume import (
    begun_fingerprint,
    open_run,
    require_same_settings,
    run_fingerprint,
    unique_id,
    write_job,
)
from t5train.data.samples.loader import ORDER_VERSION
from t5train.errors import RunChanged, SpecError
from t5train.model.starting_model import start_fingerprint
from t5train.records.stage_records import PairShards, TokenShards
from t5train.spec import RunSpec
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(tmp_path), "name": "run"})


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return TokenShards(path=tmp_path / "shards", fingerprint="5" * 64, files={})


def _model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_heads": 4, "num_layers": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=256, **sizes)).save_pretrained(folder)


def test_the_stored_settings_name_a_model_of_the_hub_and_not_its_copy(
    spec: RunSpec, shards: TokenShards, tmp_path: Path
) -> None:
    _model(copy := tmp_path / "starts/someone--t5@abc", seed=1)
    (copy / "remote-start.json").write_text('{"start": "hf://someone/t5", "revision": "abc"}')
    (copy / "manifest.json").write_text("{}")
    shards = shards.model_copy(update={"counts": {"vocab_size": 200}, "inputs": {"vocabulary": "6" * 64}})
    paths = {"model.start_from": str(copy), "tokenizer.path": str(copy)}
    starting = spec.with_settings({"model.version": "v1.0"} | paths)
    open_run(starting, shards)
    stored = (starting.run_folder / "config.yaml").read_text()
    assert "start_from: hf://someone/t5@abc\n" in stored
    assert str(copy) not in stored
    job = TrainJob.read(write_job(starting, shards, tmp_path))
    assert (job.start_name, job.spec.model.start_from) == ("someone/t5@abc", str(copy))


def test_a_run_is_identified_by_its_starting_weights_and_not_by_their_path(
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


def test_a_starting_model_whose_vocabulary_is_too_small_starts_no_run(
    spec: RunSpec, shards: TokenShards, tmp_path: Path
) -> None:
    _model(tmp_path / "model", seed=1)
    shards = shards.model_copy(update={"counts": {"vocab_size": 300}, "inputs": {"vocabulary": "6" * 64}})
    starting = spec.with_settings({"model.version": "v1.0", "model.start_from": str(tmp_path / "model")})
    with pytest.raises(SpecError, match="with a vocabulary of 256, but the tokenizer has 300 ids"):
        open_run(starting, shards)
    assert not starting.run_folder.exists()


def test_runs_with_the_same_name_and_settings_under_two_roots_have_different_ids(
    shards: TokenShards, tmp_path: Path
) -> None:
    specs = [recipe("smoke").with_settings({"storage.root": str(tmp_path / root), "name": "run"}) for root in "ab"]
    assert unique_id(specs[0].run_folder) is None
    for spec in specs:
        open_run(spec, shards)
    ids = [unique_id(spec.run_folder) for spec in specs]
    assert [len(bytes.fromhex(each or "")) * 8 for each in ids] == [128, 128]
    assert ids[0] != ids[1]
    open_run(specs[0], shards)
    assert unique_id(specs[0].run_folder) == ids[0], "the unique id of a run must not change"
    assert len({begun_fingerprint(spec.run_folder) for spec in specs}) == 1


def test_a_run_of_an_earlier_version_gets_an_id_at_its_next_start(spec: RunSpec, shards: TokenShards) -> None:
    open_run(spec, shards)
    path = spec.run_folder / "run.json"
    run_record = json.loads(path.read_text())
    del run_record["unique_id"]
    path.write_text(json.dumps(run_record))
    open_run(spec, shards)
    assert json.loads(path.read_text()) == run_record | {"unique_id": unique_id(spec.run_folder)}


def test_a_run_on_pairs_is_known_by_its_shards_and_rates_but_not_by_where_the_pairs_are(
    spec: RunSpec, tmp_path: Path
) -> None:
    shards = PairShards(path=tmp_path / "shards", fingerprint="6" * 64, files={})
    begun = spec.with_settings({"pairs.train": ["here/a.jsonl", "here/b.jsonl"]})
    open_run(begun, shards)
    moved = begun.with_settings({"pairs.train": ["there/a.jsonl", "there/b.jsonl"]})
    require_same_settings(moved)
    open_run(moved, shards)
    assert run_fingerprint(moved, shards) == run_fingerprint(begun, shards)
    others = {"pairs.mixing_temperature": 2, "optimizer.label_smoothing": 0.1, "optimizer.seed": 1}
    for setting, value in others.items():
        changed = begun.with_settings({setting: value})
        assert run_fingerprint(changed, shards) != run_fingerprint(begun, shards), "checkpoints are known by it"
        for check in (require_same_settings, lambda changed: open_run(changed, shards)):
            with pytest.raises(RunChanged, match=setting):
                check(changed)
    judged = begun.with_settings({"evaluate.best_metric": "validation_loss"})
    for check in (require_same_settings, lambda changed: open_run(changed, shards)):
        with pytest.raises(RunChanged, match=r"evaluate.*storage.*"):
            check(judged)
    with pytest.raises(RunChanged, match="shards:"):
        open_run(begun, shards.model_copy(update={"fingerprint": "8" * 64}))


@pytest.mark.parametrize("recorded", [None, 1, 99])
def test_a_run_with_another_sample_order_is_refused_and_both_versions_are_named(
    spec: RunSpec, shards: TokenShards, recorded: int | None
) -> None:
    open_run(spec, shards)
    path = spec.run_folder / "run.json"
    run_record = json.loads(path.read_text())
    assert run_record["identity"].pop("order_version") == ORDER_VERSION
    if recorded:
        run_record["identity"]["order_version"] = recorded
    path.write_text(json.dumps(run_record))
    before = path.read_bytes()
    what = rf"'run' was started with version {recorded or 1} of the sample order, and .* has version {ORDER_VERSION}"
    for look in (lambda: require_same_settings(spec), lambda: open_run(spec, shards)):
        with pytest.raises(RunChanged, match=what) as refused:
            look()
        assert "model.start_from" in str(refused.value)
    assert path.read_bytes() == before
