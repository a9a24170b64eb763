"""The example for Slurm, submitted with sbatch to a Slurm of this machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from t5train.files.run_folder import RUNS
from t5train.records import metrics
from tests.support.slurm import Slurm, one_machine_slurm, what_is_missing
from tests.support.waiting import await_that

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(what_is_missing()), reason=f"slurm: {what_is_missing()}"),
]

SCRIPT = Path(__file__).parents[2] / "deployments" / "slurm" / "train.sbatch"
SETTINGS = {
    "optimizer.num_steps": 60,
    "optimizer.warmup_steps": 10,
    "storage.checkpoint_every_steps": 1000,
    "storage.validate_sequences": 32,
}


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with one_machine_slurm(tmp_path_factory.mktemp("slurm"), os.cpu_count() or 1) as slurm:
        yield slurm


def test_a_job_near_its_limit_saves_and_is_queued_again_and_continues(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2]))
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    arguments = ["smoke", "--root", str(tmp_path / "root"), "--name", "night", *settings]
    few_cores = "--cpus-per-task=1"
    submitted = slurm.do("sbatch", "--parsable", few_cores, str(SCRIPT), *arguments, cwd=tmp_path)
    job = submitted.strip()
    lines = tmp_path / "root" / RUNS / "night" / "metrics.jsonl"
    await_that(lambda: len(metrics.read(lines)) >= 5, 180)
    await_that(lambda: slurm.job(job)["RunTime"] > "00:00:31", 60)  # earlier, the time limit would be too short
    slurm.do("scancel", "--batch", "--signal=INT", job)  # what --signal=B:INT@600 sends before the time limit
    await_that(lambda: slurm.job(job)["Restarts"] == "1", 120)
    await_that(lambda: slurm.job(job)["JobState"] in {"COMPLETED", "FAILED"}, 240)
    log = (tmp_path / f"t5-pretrain-{job}.log").read_text()
    ended = slurm.job(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    steps = [line["step"] for line in metrics.read(lines) if "loss" in line]
    assert steps == list(range(1, 61))
    assert "training resumes after step" in log
    assert "published" in log.splitlines()[-1]
