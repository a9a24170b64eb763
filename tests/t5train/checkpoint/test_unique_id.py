"""The unique id distinguishes runs with the same name and settings."""

import json
from pathlib import Path

import pytest

from t5train.checkpoint.resume import begun_fingerprint, open_run, unique_id
from t5train.records.stage_records import TokenShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return TokenShards(path=tmp_path / "shards", fingerprint="5" * 64, files={})


def spec_in(root: Path) -> RunSpec:
    return recipe("smoke").with_settings({"storage.root": str(root), "name": "run"})


def test_runs_with_the_same_name_and_settings_under_two_roots_have_different_ids(
    tmp_path: Path, shards: TokenShards
) -> None:
    specs = [spec_in(tmp_path / root) for root in "ab"]
    assert unique_id(specs[0].run_folder) is None
    for spec in specs * 2:  # the second time, the runs exist
        open_run(spec, shards)
    ids = [unique_id(spec.run_folder) for spec in specs]
    assert [len(bytes.fromhex(each or "")) * 8 for each in ids] == [128, 128]
    assert ids[0] != ids[1]
    assert len({begun_fingerprint(spec.run_folder) for spec in specs}) == 1
    again = unique_id(specs[0].run_folder)
    assert again == ids[0], "the unique id of a run must not change"


def test_a_run_of_an_earlier_version_gets_an_id_at_its_next_start(tmp_path: Path, shards: TokenShards) -> None:
    spec = spec_in(tmp_path)
    open_run(spec, shards)
    path = spec.run_folder / "run.json"
    run_record = json.loads(path.read_text())
    del run_record["unique_id"]
    path.write_text(json.dumps(run_record))
    open_run(spec, shards)
    assert json.loads(path.read_text()) == run_record | {"unique_id": unique_id(spec.run_folder)}
