"""What a dry run says of a run on pairs."""

from pathlib import Path

import pytest

from flows.cli import pairs_plan
from t5train.records.stage_records import MANIFEST
from t5train.spec.recipes import recipe
from tests.support.made_pairs import made_pair_shards


def test_epochs_are_those_of_the_shards_that_a_run_has_begun_with_and_unknown_while_these_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = recipe("reverse_and_sort").with_settings({"storage.root": str(tmp_path), "optimizer.num_steps": 200})
    pairs = [([5, 1], [5, 1])] * 50
    shards = made_pair_shards(tmp_path / f"pair-shards/x-{'a' * 12}", [{"train": pairs}], (8, 4), pack=False)
    assert pairs_plan.epochs_of_pairs(spec)[0] is None
    monkeypatch.setattr(pairs_plan, "begun_shards", lambda _: shards.fingerprint)
    assert pairs_plan.epochs_of_pairs(spec)[0] == 200 * spec.optimizer.global_batch_sequences / 50
    for content in (b"{", None):
        (shards.path / MANIFEST).unlink() if content is None else (shards.path / MANIFEST).write_bytes(content)
        assert pairs_plan.epochs_of_pairs(spec)[0] is None


def test_the_plan_says_what_is_predicted_after_the_export_and_which_extra_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs_plan, "can_score", lambda: False)
    spec = recipe("reverse_and_sort").with_settings({"evaluate.num_beams": 4})
    assert pairs_plan.pairs_rows(spec, None)["evaluation"] == (
        "at most 200 pairs of each held-out split are predicted with 4 beams after the export, measured by exact match "
        "only, as t5-pretrain[score] is not installed"
    )
    assert "evaluation" not in pairs_plan.pairs_rows(spec.with_settings({"evaluate.max_pairs": 0}), None)
