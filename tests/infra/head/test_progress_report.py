"""The progress of training describes the present: no figures of an earlier attempt, and what ranks do between steps."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from infra.head.progress_report import ProgressReport
from t5train.files.heartbeat import Beat, beat_file, write
from t5train.spec import RunSpec
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe

FIGURES = "steps, training loss (all target tokens) 2.500 nats/token, 1,000 tokens/s"


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    run = {"optimizer.num_steps": 100, "storage.root": json.dumps(str(tmp_path)), "name": "it"}
    return recipe("smoke").with_settings(run)


class Run:
    """A run's folder, whose files are written as ranks write them."""

    def __init__(self, spec: RunSpec) -> None:
        self.folder, self._spec = spec.run_folder, spec
        self.told = list[tuple[str, int, int | None]]()
        self.report = ProgressReport(spec, lambda *told: self.told.append(told))

    def begin(self, number: int, resume_tag: str | None) -> None:
        """Begin an attempt."""
        attempt = self.folder / f"attempts/{number:04d}"
        attempt.mkdir(parents=True)
        folders = {"run_folder": self.folder, "shards_folder": self.folder}
        job = TrainJob(spec=self._spec, run_fingerprint="f", resume_tag=resume_tag, **folders)
        (attempt / "spec.json").write_text(job.model_dump_json())
        self._attempt = attempt

    def beat(self, phase: Any, age: float = 0, lasting: float = 0, limit: float = 60, name: str = "rank-00000") -> None:
        now = time.monotonic()
        write(beat_file(self._attempt / name), Beat(now - age, phase, now - lasting, limit, 0))

    def write(self, *lines: dict[str, float]) -> None:
        """Write all metrics, as ranks do when they remove the lines of steps that they train again."""
        path = self.folder / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def now(self) -> tuple[str, int, int | None]:
        self.report.report()
        return self.told[-1]


def step(number: int, loss: float = 2.5) -> dict[str, float]:
    return {"step": number, "loss": loss, "tokens_per_second": 1000.0}


@pytest.fixture
def run(spec: RunSpec) -> Run:
    return Run(spec)


@pytest.fixture
def run_on_hosts(spec: RunSpec, tmp_path: Path) -> Run:
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    return Run(spec.with_settings({"cluster.hostfile": str(tmp_path / "hosts")}))


def test_progress_says_what_ranks_do_while_no_step_is_trained(run: Run) -> None:
    assert run.now() == ("steps, ranks are starting", 0, 100), "before the first attempt"
    run.begin(1, None)
    assert run.now() == ("steps, ranks are starting", 0, 100)
    run.beat("start")
    assert run.now() == ("steps, ranks are starting", 0, 100)
    run.beat("compile")
    assert run.now() == ("steps, taking the first step", 0, 100)
    run.write({"step": 0, "unigram_content_loss": 6.125})
    assert run.now() == ("steps, taking the first step", 0, 100)
    run.write({"step": 0, "unigram_content_loss": 6.125}, step(7))
    run.beat("step")
    assert run.now() == (FIGURES, 7, 100)
    run.beat("save")
    assert run.now() == (f"{FIGURES}, saving a checkpoint", 7, 100)
    run.beat("save", age=60)
    assert run.now() == (FIGURES, 7, 100), "the rank has ended"


def test_ranks_are_said_to_compile_only_if_torch_compile_is_used(spec: RunSpec) -> None:
    for uses_it, expected in ((False, "taking"), (True, "compiling the model and taking")):
        run = Run(spec.with_settings({"model.compile": uses_it, "name": f"compile-{uses_it}"}))
        run.begin(1, None)
        run.beat("compile")
        assert run.now() == (f"steps, {expected} the first step", 0, 100)


def test_losses_are_shown_with_the_tokens_that_they_are_of_and_the_unigram_baseline(run: Run) -> None:
    run.begin(1, None)
    run.beat("step")
    validated = {"step": 10, "validation_loss": 5.0, "validation_content_loss": 5.5}
    run.write({"step": 0, "unigram_content_loss": 6.125}, step(10), validated)
    losses = "5.000 (all target tokens), 5.500 (masked tokens; unigram baseline 6.125)"
    assert run.now() == (f"{FIGURES}, validation loss after step 10: {losses}", 10, 100)


def test_of_a_run_on_pairs_the_loss_and_the_share_of_exact_matches_are_shown(run: Run) -> None:
    run.begin(1, None)
    run.beat("step")
    validated = {"step": 10, "validation_loss": 0.5, "validation_exact_match": 0.875}
    run.write({"step": 0, "unigram_loss": 6.125}, step(10), validated)
    shown = "validation loss after step 10: 0.500 (unigram baseline 6.125), exact match 87.5%"
    assert run.now() == (f"{FIGURES}, {shown}", 10, 100)


@pytest.fixture
def run_by_chrf(spec: RunSpec) -> Run:
    settings = {"pairs.train": ["pairs.jsonl"], "evaluate.best_metric": "validation_chrf", "evaluate.pause_share": 0.2}
    return Run(spec.with_settings(settings))


def test_predicting_is_told_from_validating_and_the_score_is_shown(run_by_chrf: Run) -> None:
    run_by_chrf.begin(1, None)
    validated = {"step": 100, "validation_loss": 0.5, "validation_exact_match": 0.875, "validation_chrf": 45.06}
    run_by_chrf.write(step(99), validated | {"step": 99})
    run_by_chrf.beat("predict")
    shown = "validation loss after step 99: 0.500, exact match 87.5%, chrF 45.1, predicting held-out pairs"
    assert run_by_chrf.now() == (f"{FIGURES}, {shown}", 99, 100)
    run_by_chrf.write(step(100), validated)
    assert run_by_chrf.now()[0] == "s since the last step, predicting held-out pairs"


def test_predictions_above_their_share_are_warned_of_once_with_how_many_would_keep_to_it(
    run_by_chrf: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run_by_chrf.begin(1, None)
    for share in (0.2, 0.5, 0.6):
        run_by_chrf.write(step(99), {"step": 99, "predict_share": share, "predicted_pairs": 100})
        run_by_chrf.beat("step")
        run_by_chrf.now()
    (found,) = warnings(caplog)
    assert found.startswith("predicting held-out pairs has taken 50% of the time of training, more than the 20% of ")
    assert "evaluate.pause_share. This run keeps its 100 pairs" in found
    assert "evaluate.best_pairs=25, or" in found, "25 in the place of 100 take a fifth of the time"


def test_a_validation_without_a_loss_of_masked_tokens_is_left_out(run: Run) -> None:
    run.begin(1, None)
    run.write({"step": 3, "validation_loss": 3.0}, step(4))
    run.beat("step")
    assert run.now() == (FIGURES, 4, 100)


def test_figures_of_an_earlier_attempt_are_not_shown(run: Run) -> None:
    run.begin(1, None)
    run.beat("step")
    run.write(step(56), step(57))
    assert run.now()[1] == 57
    time.sleep(0.05)  # file systems may record times in hundredths of a second
    run.begin(2, "step-00000050")
    waiting = ("steps, ranks are starting, resuming after step 50", 50, 100)
    assert run.now() == waiting
    run.beat("compile")
    run.write(step(50))  # ranks have removed the later lines
    assert run.now() == ("steps, taking the first step, resuming after step 50", 50, 100)
    run.beat("step")
    assert run.now() == waiting
    run.write(step(50), step(51, loss=2.25))
    assert run.now() == ("steps, training loss (all target tokens) 2.250 nats/token, 1,000 tokens/s", 51, 100)


def test_ranks_on_hosts_report_no_phase_but_no_old_figures_either(run_on_hosts: Run) -> None:
    run_on_hosts.begin(1, "step-00000050")
    run_on_hosts.write(step(57))
    os.utime(run_on_hosts.folder / "metrics.jsonl", (time.time() - 60,) * 2)
    assert run_on_hosts.now() == ("steps, ranks are starting, resuming after step 50", 50, 100)
    run_on_hosts.write(step(50), step(51))
    assert run_on_hosts.now() == (FIGURES, 51, 100)


def test_after_the_last_step_progress_says_what_is_left_to_do(run: Run) -> None:
    run.begin(1, None)
    run.write(step(99), step(100))
    run.beat("step")
    assert run.now()[1:] == (100, 100)
    run.beat("validate")
    what, seconds, total = run.now()
    assert what == "s since the last step, validating the result"
    assert (0 <= seconds < 60, total) == (True, None)
    run.beat("save")
    assert run.now()[0] == "s since the last step, saving the last checkpoint and the witness"
    run.beat("save", age=60)
    assert run.now() == (FIGURES, 100, 100), "the ranks have ended"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("phase", "at", "words"),
    [
        ("start", (600, 300), "no step has ended for 5 min: ranks are starting"),
        ("compile", (1800, 900), "no step has ended for 15 min: ranks are preparing the first step"),
        ("save", (1800, 300), "no step has ended for 5 min: ranks are saving"),
        ("validate", (1800, 900), "no step has ended for 15 min: ranks are validating"),
        ("predict", (1800, 900), "no step has ended for 15 min: ranks are predicting held-out pairs"),
    ],
)
def test_a_phase_that_takes_unusually_long_is_reported_once_and_then_rarely(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, phase: str, at: list[int], words: str
) -> None:
    limit, usual = at
    now = time.monotonic()
    monkeypatch.setattr("infra.head.progress_report.time.monotonic", lambda: now)
    run.begin(1, None)
    run.beat(phase, lasting=usual - 5, limit=limit)
    run.now()
    assert not warnings(caplog)
    for lasting in (usual + 1, usual + 2, 2 * usual - 5):
        run.beat(phase, lasting=lasting, limit=limit)
        run.now()
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith(words)
    assert f"cluster.deadlines.{phase}_seconds" in warnings(caplog)[0]
    run.beat(phase, lasting=2 * usual + 5, limit=limit)
    run.now()
    assert len(warnings(caplog)) == 2


def test_progress_says_how_long_ranks_on_hosts_have_saved(run_on_hosts: Run, caplog: pytest.LogCaptureFixture) -> None:
    run_on_hosts.begin(1, None)
    run_on_hosts.write(step(7))
    run_on_hosts.beat("save", name="head")
    assert run_on_hosts.now()[0].endswith("tokens/s, saving a checkpoint")
    run_on_hosts.beat("save", lasting=425, limit=1800, name="head")
    assert run_on_hosts.now()[0].endswith("tokens/s, saving a checkpoint for 7 min")
    assert len(warnings(caplog)) == 1


def test_a_save_as_long_as_earlier_ones_is_not_reported_again(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.begin(1, None)
    for phase, lasting in (("save", 400), ("step", 1), ("save", 400)):
        run.beat(phase, lasting=lasting, limit=1800)
        run.now()
    assert len(warnings(caplog)) == 1
    run.begin(2, None)
    run.beat("step", lasting=1)
    run.now()
    run.beat("save", lasting=901, limit=1800)
    run.now()
    assert len(warnings(caplog)) == 2, "it may still be one that never ends"


def test_ranks_that_give_no_sign_of_life_at_the_start_are_reported(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin(1, None)
    run.now()
    assert not warnings(caplog)
    later = time.monotonic() + 301
    monkeypatch.setattr("infra.head.progress_report.time.monotonic", lambda: later)
    run.now()
    assert warnings(caplog)[0].startswith("no step has ended for 5 min: ranks are starting")
