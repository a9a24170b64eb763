"""What the head stores beside checkpoints in a bucket, so that another machine continues the run."""

from pathlib import Path

from infra.head.storage.store_claimant import claimant
from t5train.spec.recipes import recipe


def test_a_model_of_the_hub_is_named_in_the_bucket_and_not_its_copy_on_this_machine(tmp_path: Path) -> None:
    (copy := tmp_path / "starts/someone--t5@abc").mkdir(parents=True)
    (copy / "remote-start.json").write_text('{"start": "hf://someone/t5", "revision": "abc"}')
    places = {"storage.root": str(tmp_path), "model.start_from": str(copy), "tokenizer.path": str(copy)}
    stored = claimant(recipe("smoke").with_settings(places)).config
    assert "start_from: hf://someone/t5@abc\n" in stored
    assert str(copy) not in stored
