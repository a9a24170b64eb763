"""Real DeepSpeed training whose result is its best checkpoint: chosen alike after a kill, kept, and certified."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from t5train.checkpoint import resume, sidecar
from t5train.checkpoint.consolidate import consolidate
from t5train.checkpoint.resume import conclude, finished, write_job
from t5train.data.pairs.pair_shards import build_pair_shards
from t5train.data.pairs.pairs import build_pairs
from t5train.errors import IncompleteCheckpoint, LaunchError, NothingVerifies
from t5train.records.metrics import read
from t5train.records.stage_records import PairShards, TokenizerFiles
from t5train.records.witness import WITNESS_FILES, Witness
from t5train.release.certification import certify
from t5train.release.export import export
from t5train.spec import RunSpec
from tests.support.training.launched import Trained, job, spec_of, train

pytestmark = pytest.mark.slow

PAIRS = {
    "pairs.train": ["reverse_digits"],
    "pairs.input_tokens": 48,
    "pairs.target_tokens": 48,
    "optimizer.num_steps": 9,
    "evaluate.best_metric": "validation_token_accuracy",
    "storage.validate_every_steps": 2,
    "storage.checkpoint_every_steps": 3,
    "storage.keep_last": 1,
}
PATIENT = PAIRS | {"evaluate.patience": 2}
SCORES = {2: 0.1, 4: 0.4, 6: 0.4, 8: math.nan, 9: 0.3}
"""What validations of these trainings find, by step: the best is step 4, and two later ones are not better."""


@pytest.fixture(scope="module")
def pair_shards(tmp_path_factory: pytest.TempPathFactory, pydocs_tokenizer: TokenizerFiles) -> PairShards:
    root, spec = tmp_path_factory.mktemp("pairs"), spec_of("zero1-fp32").with_settings(PAIRS).pairs
    return build_pair_shards(spec, build_pairs(spec, root), pydocs_tokenizer, root, workers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pair_shards: PairShards) -> Trained:
    root = tmp_path_factory.mktemp("trained") / "runs"
    scored: dict[str, Any] = {"scores": SCORES}
    jobs = [job("whole", "zero1-fp32", PAIRS, **scored), job("patient", "zero1-fp32", PATIENT, **scored)]
    for step in (3, 6):  # before the best checkpoint, and between it and the end
        killed = {"killed": f"{root}/at-{step}", "resume_tag": f"step-{step:08d}"}
        jobs.append(job(f"at-{step}", "zero1-fp32", PAIRS, stop_at=step, **scored))
        jobs.append(job(f"resumed-{step}", "zero1-fp32", PAIRS, **scored, **killed))
    other_layout = {"other_layout": f"{root}/at-6", "other_tag": "step-00000006"}
    jobs.append(job("relaid", "zero2-fp32", PAIRS, **scored, **other_layout))
    jobs.append(job("apart", "zero1-fp32", PAIRS, ranks_a_node=1, **scored))
    jobs.append(job("stopped", "zero1-fp32", PAIRS, sigterm_at=4, **scored))
    for name, steps in (("ended", 4), ("continued", 9), ("unlimited", 9)):
        settings = PAIRS | {"optimizer.schedule": "constant", "optimizer.num_steps": steps}
        jobs.append(job(name, "zero1-fp32", settings, **scored))
    jobs[-2] |= {"killed": f"{root}/ended", "resume_tag": "step-00000004"}
    jobs.append(job("more-patient", "zero1-fp32", PAIRS, **scored))
    jobs[-1] |= {"killed": f"{root}/patient", "resume_tag": "step-00000008"}
    return train(root, jobs, pair_shards)


def kept(trained: Trained, name: str) -> list[str]:
    return sorted(path.name for path in (trained.root / name / "checkpoints").glob("step-*"))


def test_the_best_checkpoint_is_kept_beside_the_newest_with_its_own_witness(trained: Trained) -> None:
    folder = trained.root / "whole/checkpoints"
    assert trained.found("whole")["step"] == 9
    assert kept(trained, "whole") == ["step-00000004", "step-00000009"]
    assert Witness.load(folder / "step-00000004").step == 4
    assert not (folder / "step-00000009/witness.json").exists()
    assert [sidecar.read(folder / tag, 1).best_step for tag in kept(trained, "whole")] == [4, 4]


@pytest.mark.parametrize("step", [3, 6])
def test_a_killed_run_resumes_bit_equal_with_the_same_best_checkpoint(trained: Trained, step: int) -> None:
    whole, resumed = trained.found("whole"), trained.found(f"resumed-{step}")
    assert whole["masters"] == resumed["masters"]
    assert kept(trained, f"resumed-{step}") == kept(trained, "whole")
    best = [Witness.load(trained.root / name / "checkpoints/step-00000004") for name in ("whole", f"resumed-{step}")]
    assert best[0].tensors == best[1].tensors
    assert best[0].validation == best[1].validation
    assert best[0].curve == best[1].curve


def test_a_run_that_continues_in_another_layout_has_the_same_best_checkpoint(trained: Trained) -> None:
    found = [sidecar.read(trained.root / name / "checkpoints/step-00000009", 0).best for name in ("whole", "relaid")]
    assert found[0] == found[1] is not None


def test_training_stops_when_the_metric_has_not_improved_for_too_long(trained: Trained) -> None:
    assert trained.found("patient")["step"] == 8
    assert max(int(line["step"] or 0) for line in read(trained.root / "patient/metrics.jsonl")) == 8
    assert kept(trained, "patient") == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize(("continued", "whole"), [("continued", "unlimited"), ("more-patient", "whole")])
def test_a_run_that_is_continued_beyond_its_end_ends_as_one_longer_run_would_have(
    trained: Trained, continued: str, whole: str
) -> None:
    found = trained.found(continued)
    assert found["step"] == 9
    assert found["masters"] == trained.found(whole)["masters"]
    assert kept(trained, continued) == kept(trained, whole)
    bests = [Witness.load(trained.root / name / "checkpoints/step-00000004") for name in (continued, whole)]
    assert bests[0].tensors == bests[1].tensors
    last = [sidecar.read(trained.root / name / "checkpoints/step-00000009", 0).best for name in (continued, whole)]
    assert last[0] == last[1] is not None


def test_a_step_that_is_validated_is_judged_even_if_training_is_asked_to_end_there(trained: Trained) -> None:
    assert trained.found("stopped")["error"] == "Preempted"
    best = sidecar.read(trained.root / "stopped/checkpoints/step-00000004", 0).best
    assert best is not None
    assert best.step == 4


def test_the_witness_belongs_to_the_first_ranks_files_if_nodes_share_no_disk(trained: Trained) -> None:
    folders = [trained.root / f"apart/node-{node}/checkpoints/step-00000004" for node in range(2)]
    recorded = [sidecar.read(folder, node).files.keys() for node, folder in enumerate(folders)]
    assert set(WITNESS_FILES) <= recorded[0]
    assert not set(WITNESS_FILES) & recorded[1]
    assert Witness.load(folders[0]).tensors == Witness.load(trained.root / "whole/checkpoints/step-00000004").tensors


@pytest.fixture
def ended(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run that ended early, as its ranks leave it."""
    spec = spec_of("zero1-fp32").with_settings(PATIENT | {"storage.root": str(tmp_path), "name": "patient"})
    shutil.copytree(trained.root / "patient", spec.run_folder)
    own = sidecar.read(spec.run_folder / "checkpoints/step-00000008", 0).run_fingerprint
    monkeypatch.setattr(resume, "run_fingerprint", lambda *_: own)
    return spec


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")  # transformers warns so for every T5 v1.1
def test_what_is_published_is_the_best_checkpoint_and_is_certified(
    ended: RunSpec,
    pair_shards: PairShards,
    pydocs_tokenizer: TokenizerFiles,
    tmp_path: Path,
    restore_torch_threads: None,
) -> None:
    checkpoint = conclude(ended, pair_shards)
    assert (checkpoint.step, checkpoint.tag) == (4, "step-00000004")
    again = finished(ended, pair_shards)
    assert again is not None
    assert again.seal == checkpoint.seal
    folder = ended.run_folder
    weights = consolidate(folder / "checkpoints", tmp_path / "weights", tag=checkpoint.tag)
    exported = export(weights, pydocs_tokenizer, folder / "witness", ended, tmp_path / "export")
    assert certify(exported.path, folder / "witness").passed
    witness = json.loads((folder / "witness/witness.json").read_text())
    assert witness["validation"]["validation_token_accuracy"] == SCORES[4]
    assert (
        "measurements at step 4, the best by validation_token_accuracy of a run of up to 9 steps"
        in (exported.path / "README.md").read_text()
    )


def test_a_run_that_has_not_ended_is_not_concluded(ended: RunSpec, pair_shards: PairShards) -> None:
    shutil.rmtree(ended.run_folder / "checkpoints/step-00000008")
    with pytest.raises(LaunchError, match="step-00000004, which is neither"):
        conclude(ended, pair_shards)


def test_a_run_does_not_resume_from_a_checkpoint_without_the_best_one_before_it(
    ended: RunSpec, pair_shards: PairShards, tmp_path: Path
) -> None:
    (ended.run_folder / "checkpoints/step-00000004/witness.json").write_text("{}")
    with pytest.raises(NothingVerifies, match="step-00000008 lacks the best checkpoint before it"):
        write_job(ended, pair_shards, tmp_path)
    with pytest.raises(IncompleteCheckpoint, match=r"witness\.json"):
        conclude(ended, pair_shards)
