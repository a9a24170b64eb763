"""What is reported of training while ranks run: what they do now, and the newest figures of this attempt.

A resumed run has figures of earlier attempts, also of steps that will be trained again. They are not shown: until this
attempt has trained a step, its own state is.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from infra.node.attempts.attempt import HEAD, rank_name
from t5train.files import heartbeat
from t5train.files.heartbeat import Beat, Phase
from t5train.files.run_folder import ATTEMPT_SPEC, ATTEMPTS, METRICS, step_of
from t5train.progress import Progress
from t5train.records.metrics import (
    EXACT_MATCH,
    GENERATED,
    PREDICT_SHARE,
    PREDICTED_PAIRS,
    TRAINING_LOSS,
    UNIGRAM,
    UNIGRAM_OF_TARGETS,
    VALIDATION,
    VALIDATION_OF_TARGETS,
    MetricsSeries,
)
from t5train.spec import EvaluateSpec, RunSpec
from t5train.spec.rank_job import TrainJob

_PREDICTING = heartbeat.PHASE_DESCRIPTIONS["predict"]
_BETWEEN_STEPS = {"save": "saving a checkpoint", "validate": "validating", "predict": _PREDICTING}
_AFTER_STEPS = {
    "save": "saving the last checkpoint and the witness",
    "validate": "validating the result",
    "predict": _PREDICTING,
}
_log = logging.getLogger(__name__)


def before_first_step(spec: RunSpec) -> str:
    """Return what ranks do between their start and the end of their first step."""
    return "compiling the model and taking the first step" if spec.model.compile else "taking the first step"


class ProgressReport:
    """Reports the progress of a run's training to ``progress``."""

    def __init__(self, spec: RunSpec, progress: Progress) -> None:
        self._spec, self._progress = spec, progress
        self._path = spec.run_folder / METRICS
        self._metrics = MetricsSeries(self._path)
        self._attempt: Path | None = None
        self._resumed_from = 0
        self._slow_phases, self._pauses = _SlowPhases(), _Pauses(spec.evaluate)
        self._began_at, self._has_beaten = 0.0, False

    def report(self) -> None:
        """Report the present state."""
        self._find_attempt()
        self._metrics.refresh()
        beat = self._beat()
        total, phase = self._spec.optimizer.num_steps, beat.phase if beat else None
        if beat is None and not self._has_beaten and self._attempt is not None and not self._has_trained(None):
            limit = self._spec.cluster.deadlines.start_seconds
            beat = Beat(time.monotonic(), "start", self._began_at, limit, 0)
        lasting = self._slow_phases.note(self._attempt, beat) if beat else ""
        if not self._has_trained(phase):
            since = f", resuming after step {self._resumed_from:,}" if self._resumed_from else ""
            doing = before_first_step(self._spec) if phase == "compile" else "ranks are starting"
            self._progress(f"steps, {doing}{lasting}{since}", self._resumed_from, total)
            return
        self._pauses.note(self._attempt, self._metrics.newest)
        if self._metrics.last_step == total and phase in _AFTER_STEPS:
            # wall-clock time, as that of the file is
            seconds = max(0, int(time.time() - self._path.stat().st_mtime))
            self._progress(f"s since the last step, {_AFTER_STEPS[phase]}", seconds, None)
        else:
            between = _BETWEEN_STEPS.get(phase or "")
            facts = [*self._figures(), *([f"{between}{lasting}"] if between else [])]
            self._progress(f"steps, {', '.join(facts)}", self._metrics.last_step, total)

    def _find_attempt(self) -> None:
        """Find the newest attempt, and which step it resumes after."""
        newest = max((self._spec.run_folder / ATTEMPTS).glob("[0-9]*"), default=None)
        if newest == self._attempt or newest is None or not (newest / ATTEMPT_SPEC).exists():
            return
        job = TrainJob.read(newest / ATTEMPT_SPEC)
        resumed_from = job.consolidated.clock.step if job.consolidated else 0
        self._attempt, self._began_at, self._has_beaten = newest, time.monotonic(), False
        self._resumed_from = step_of(job.resume_tag) if job.resume_tag else resumed_from

    def _beat(self) -> Beat | None:
        """Return the last heartbeat of the first rank, in this machine's clock; None if it is unknown or has ended."""
        if self._attempt is None:
            return None
        name = rank_name(0) if self._spec.cluster.hostfile is None else HEAD
        beat = heartbeat.read(heartbeat.beat_file(self._attempt / name))
        if beat is None or time.monotonic() - beat.beat >= heartbeat.FRESH_SECONDS:
            return None
        self._has_beaten = True
        return beat

    def _has_trained(self, phase: str | None) -> bool:
        """Return whether the metrics have a step of this attempt."""
        if "loss" not in self._metrics.newest or phase in {"start", "compile"}:
            return False
        if self._attempt is None:
            return True
        # Ranks remove the lines of steps that they will train again before they train their first step.
        is_older = self._path.stat().st_mtime < (self._attempt / ATTEMPT_SPEC).stat().st_mtime
        return not is_older and self._metrics.last_step > self._resumed_from

    def _figures(self) -> list[str]:
        newest = self._metrics.newest
        figures = [f"{TRAINING_LOSS} {newest['loss']:.3f} nats/token", f"{newest['tokens_per_second']:,.0f} tokens/s"]
        if VALIDATION in newest:
            figures.append(self._validation())
        elif EXACT_MATCH in newest:
            figures.append(self._validation_of_pairs())
        return figures

    def _validation_of_pairs(self) -> str:
        newest = self._metrics.newest
        baseline = newest.get(UNIGRAM_OF_TARGETS)
        beside = "" if baseline is None else f" (unigram baseline {baseline:.3f})"
        metric = self._spec.evaluate.best_metric or ""
        generated = f", {GENERATED[metric]} {newest[metric]:.1f}" if metric in GENERATED and metric in newest else ""
        return (
            f"validation loss after step {self._metrics.validated_step:,}: {newest[VALIDATION_OF_TARGETS]:.3f}{beside}"
            f", exact match {newest[EXACT_MATCH]:.1%}{generated}"
        )

    def _validation(self) -> str:
        newest = self._metrics.newest
        of_targets, baseline = newest.get(VALIDATION_OF_TARGETS), newest.get(UNIGRAM)
        same_tokens = "" if of_targets is None else f"{of_targets:.3f} (all target tokens), "
        beside = "" if baseline is None else f"; unigram baseline {baseline:.3f}"
        return (
            f"validation loss after step {self._metrics.validated_step:,}: {same_tokens}"
            f"{newest[VALIDATION]:.3f} (masked tokens{beside})"
        )


class _Pauses:
    """Warns, once for each attempt, if predictions of validations take more than their share of the time."""

    def __init__(self, spec: EvaluateSpec) -> None:
        self._spec = spec
        self._warned_of: Path | None = None

    def note(self, attempt: Path | None, newest: Mapping[str, float]) -> None:
        """Note the share of the time so far. It changes nothing: choices must not depend on how fast a machine is."""
        share, allowed = newest.get(PREDICT_SHARE, 0.0), self._spec.pause_share
        if share <= allowed or attempt == self._warned_of:
            return
        self._warned_of = attempt
        fitting = newest[PREDICTED_PAIRS] * (allowed / (1 - allowed)) / (share / (1 - share))
        _log.warning(
            "predicting held-out pairs has taken %.0f%% of the time of training, more than the %.0f%% of "
            "evaluate.pause_share. This run keeps its %d pairs, which decide what its best checkpoint is: for the "
            "next one, set evaluate.best_pairs=%d, or a higher storage.validate_every_steps",
            *(100 * share, 100 * allowed, newest[PREDICTED_PAIRS], max(1, fitting)),
        )


class _SlowPhases:
    """Warns of phases that take unusually long: once, and again each time that their duration has doubled.

    A network that fails between hosts during a save, for example, is noticed by no rank until the deadline of the save.
    """

    def __init__(self) -> None:
        self._present: tuple[Path | None, Phase, int] | None = None
        self._seconds = 0.0
        self._longest: dict[Phase, float] = {}
        self._unusual_seconds = self._warn_at_seconds = 0.0

    def note(self, attempt: Path | None, beat: Beat) -> str:
        """Note what ranks do. Returns for how long they have been doing so if that is unusual: `` for 7 min``."""
        present = (attempt, beat.phase, beat.step)
        if present != self._present:
            if self._present is not None and self._present[0] == attempt:  # else it was not completed
                before = self._present[1]
                self._longest[before] = max(self._seconds, self._longest.get(before, 0.0))
            as_before = min(2 * self._longest.get(beat.phase, 0.0), beat.limit / 2)
            self._unusual_seconds = max(heartbeat.unusual_seconds(beat), as_before)
            self._present, self._warn_at_seconds = present, self._unusual_seconds
        self._seconds = time.monotonic() - beat.since
        if self._seconds < self._unusual_seconds:
            return ""
        if self._seconds >= self._warn_at_seconds:
            self._warn_at_seconds = 2 * self._seconds
            _log.warning(
                "no step has ended for %.0f min: ranks are %s (step %d). Look at the ranks' logs, and check the hosts' "
                "disks and the network between the hosts. A rank is ended when this takes %.0f min (cluster.deadlines"
                ".%s_seconds)",
                self._seconds // 60,
                heartbeat.PHASE_DESCRIPTIONS[beat.phase],
                beat.step,
                beat.limit / 60,
                beat.phase,
            )
        return f" for {self._seconds // 60:.0f} min"
