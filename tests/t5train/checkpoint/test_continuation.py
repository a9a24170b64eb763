"""A run can be continued beyond its end where no step depended on it, and otherwise the error says why not."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from t5train.checkpoint import resume_point
from t5train.checkpoint.resume import (
    finished,
    has_finished,
    load_run_spec,
    open_run,
    published_name,
    require_same_settings,
    run_fingerprint,
    write_job,
)
from t5train.errors import NothingVerifies, RunChanged, SpecError
from t5train.files.run_folder import CHECKPOINTS, RUN
from t5train.records.best_so_far import BestSoFar
from t5train.records.stage_records import MANIFEST, Checkpoint, PairShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.checkpoints import small_tags

JUDGED = {"evaluate.best_metric": "validation_loss", "storage.validate_every_steps": 50}


@pytest.fixture
def shards(tmp_path: Path) -> PairShards:
    return PairShards(path=tmp_path / "shards", fingerprint="6" * 64, files={})


def ended(root: Path, shards: PairShards, step: int = 100, best: BestSoFar | None = None, **settings: Any) -> RunSpec:
    """A run of 100 steps on pairs that has ended at a step."""
    steps = {"optimizer.num_steps": 100, "optimizer.warmup_steps": 10, "optimizer.schedule": "constant"}
    named = {"storage.root": json.dumps(str(root)), "name": "it", "pairs.train": ["sort_digits"], "cluster.ranks": 1}
    spec = recipe("smoke").with_settings({**named, **steps, **settings})
    open_run(spec, shards)
    fingerprint = run_fingerprint(spec, shards)
    for at in sorted({step, best.step if best and best.step else step}):
        tag = small_tags.save(spec.run_folder / CHECKPOINTS, at, ranks=1, best=best, run_fingerprint=fingerprint).name
    resume_point.note_complete(spec.run_folder, tag)
    Checkpoint(path=spec.run_folder, fingerprint=fingerprint, files={}, step=step, tag=tag).commit()
    return spec


def resume(spec: RunSpec, shards: PairShards) -> None:
    """Do what a start does until its ranks begin."""
    open_run(spec, shards)
    assert finished(spec, shards) is None
    write_job(spec, shards, spec.run_folder)


@pytest.mark.parametrize("schedule", ["constant", "inverse-sqrt"])
def test_more_steps_reopen_a_run_that_has_ended_and_its_checkpoints_stay_its_own(
    tmp_path: Path, shards: PairShards, schedule: str
) -> None:
    spec = ended(tmp_path, shards, **{"optimizer.schedule": schedule})
    assert has_finished(spec)
    before = run_fingerprint(spec, shards)
    longer = spec.with_settings({"optimizer.num_steps": 200})
    for asked in (longer, longer.with_settings({"optimizer.num_steps": 300})):
        require_same_settings(asked)
        assert not has_finished(asked)
        resume(asked, shards)
        assert run_fingerprint(asked, shards) == before
        assert load_run_spec(spec.run_folder).optimizer.num_steps == asked.optimizer.num_steps
        assert not (spec.run_folder / MANIFEST).exists()
        resume(asked, shards)
    for look in (require_same_settings, lambda changed: open_run(changed, shards)):
        with pytest.raises(RunChanged, match=r"optimizer\.num_steps: 300 -> 200\)\. Set these back"):
            look(longer)


def test_a_continued_run_is_published_beside_its_earlier_version(tmp_path: Path, shards: PairShards) -> None:
    spec = ended(tmp_path, shards)
    longer = spec.with_settings({"optimizer.num_steps": 200})
    assert [published_name(each) for each in (spec, longer)] == ["it", "it-200-steps"]
    resume(longer, shards)
    assert published_name(longer) == "it-200-steps"
    assert published_name(longer.with_settings({"name": "other"})) == "other"


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_that_ends_with_the_run_is_not_continued(tmp_path: Path, shards: PairShards, schedule: str) -> None:
    longer = ended(tmp_path, shards, **{"optimizer.schedule": schedule}).with_settings({"optimizer.num_steps": 200})
    words = rf"'it' cannot be continued to 200 steps .* with optimizer\.schedule={schedule}, .* set model\.start_from"
    for look in (require_same_settings, lambda changed: open_run(changed, shards)):
        with pytest.raises(RunChanged, match=words):
            look(longer)
    with pytest.raises(RunChanged, match=r"num_steps: 100 -> 200; optimizer\.seed: 0 -> 1\)\. Set these back"):
        require_same_settings(longer.with_settings({"optimizer.seed": 1}))
    assert has_finished(longer)


def test_a_run_that_patience_has_ended_is_continued_by_more_patience_and_not_by_more_steps(
    tmp_path: Path, shards: PairShards
) -> None:
    judged = BestSoFar(step=50, value=1.0, validations_since=2)
    patient = JUDGED | {"evaluate.patience": 2, "optimizer.num_steps": 500, "optimizer.schedule": "cosine"}
    spec = ended(tmp_path, shards, step=150, best=judged, **patient)
    constant = {"optimizer.schedule": "constant"}
    for more, said in (({"evaluate.patience": 1}, "patience: 2 -> 1"), (constant, "schedule: ")):
        with pytest.raises(RunChanged, match=said):
            require_same_settings(spec.with_settings(more))
    for patience, name in ((3, "it-patience-3"), (None, "it-patience-none")):
        more = spec.with_settings({"evaluate.patience": patience})
        require_same_settings(more)
        resume(more, shards)
        assert run_fingerprint(more, shards) == run_fingerprint(spec, shards)
        assert published_name(more) == name
        assert not has_finished(more)


def test_more_steps_for_a_run_that_patience_has_ended_are_refused_with_the_patience_to_set(
    tmp_path: Path, shards: PairShards
) -> None:
    judged = BestSoFar(step=50, value=1.0, validations_since=2)
    spec = ended(tmp_path, shards, step=150, best=judged, **JUDGED, **{"evaluate.patience": 2})
    longer = spec.with_settings({"optimizer.num_steps": 900})
    with pytest.raises(RunChanged, match=r"ended early, after step 150, .* Set evaluate\.patience to more than 2"):
        require_same_settings(longer)
    require_same_settings(longer.with_settings({"evaluate.patience": 3}))


def test_a_run_whose_checkpoint_does_not_verify_stays_as_it_ended_when_it_is_to_be_continued(
    tmp_path: Path, shards: PairShards
) -> None:
    spec = ended(tmp_path, shards)
    (spec.run_folder / CHECKPOINTS / "step-00000100/part0.pt").write_bytes(b"damaged")
    before = {name: (spec.run_folder / name).read_bytes() for name in (RUN, MANIFEST)}
    with pytest.raises(NothingVerifies):
        resume(spec.with_settings({"optimizer.num_steps": 200}), shards)
    assert {name: (spec.run_folder / name).read_bytes() for name in before} == before
    require_same_settings(spec)


def test_a_run_that_is_killed_while_it_is_reopened_goes_on_with_either_end(
    tmp_path: Path, shards: PairShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ended(tmp_path, shards)
    longer = spec.with_settings({"optimizer.num_steps": 200})
    with monkeypatch.context() as patch:
        patch.setattr("t5train.checkpoint.resume.write_json", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resume(longer, shards)
    for asked in (spec, longer):
        assert not has_finished(asked)
        resume(asked, shards)
        assert load_run_spec(spec.run_folder).optimizer.num_steps == asked.optimizer.num_steps


@pytest.mark.parametrize("is_here", [True, False])
def test_a_last_step_that_was_judged_only_because_it_was_the_last_is_not_continued(
    tmp_path: Path, shards: PairShards, is_here: bool
) -> None:
    judged = BestSoFar(step=60, value=1.0)
    spec = ended(tmp_path, shards, best=judged, **JUDGED | {"storage.validate_every_steps": 60})
    longer = spec.with_settings({"optimizer.num_steps": 200})
    checkpoints, elsewhere = spec.run_folder / CHECKPOINTS, tmp_path / "checkpoints"
    if not is_here:  # but on hosts or in a bucket
        checkpoints.rename(elsewhere)
        require_same_settings(longer)
        elsewhere.rename(checkpoints)
    words = r"its last step, 100, was judged .* storage\.validate_every_steps is 60"
    with pytest.raises(RunChanged, match=words):
        require_same_settings(longer) if is_here else write_job(longer, shards, spec.run_folder)
    assert has_finished(spec)


@pytest.mark.parametrize("damaged", [{}, {"optimizer": {}}, {"optimizer": 3}])
def test_the_name_of_a_run_whose_file_is_damaged_is_refused(
    tmp_path: Path, shards: PairShards, damaged: dict[str, Any]
) -> None:
    spec = ended(tmp_path, shards)
    path = spec.run_folder / RUN
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": damaged}))
    with pytest.raises(SpecError, match=r"run\.json is damaged .* Restore the file"):
        published_name(spec)
