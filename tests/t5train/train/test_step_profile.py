"""Profiler traces of single steps, without training."""

import logging
from pathlib import Path

import pytest
import torch

from t5train.errors import Preempted, TrainingError
from t5train.spec.monitor_spec import ProfileSpec
from t5train.train import step_profile
from t5train.train.step_profile import StepProfile

SPEC = ProfileSpec(steps="10:13")


@pytest.fixture(autouse=True)
def _only_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "recorded_activities", lambda: [torch.profiler.ProfilerActivity.CPU])


@pytest.fixture
def profile(tmp_path: Path) -> StepProfile | None:
    """Of rank 0, in an attempt that resumes after step 8."""
    return StepProfile.of(SPEC, tmp_path / "profiles", 8)


def take(profile: StepProfile, *steps: int) -> list[bool]:
    due = []
    for step in steps:
        profile.begin(step)
        torch.ones(2).sum()
        due.append(profile.end(step))
    return due


def end_with(profile: StepProfile, error: Exception, *steps: int) -> None:
    with profile:
        take(profile, *steps)
        raise error


def test_nothing_is_made_if_no_steps_are_asked_for(tmp_path: Path) -> None:
    assert StepProfile.of(ProfileSpec(), tmp_path, 0) is None


def test_an_attempt_that_resumes_after_the_steps_profiles_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert StepProfile.of(SPEC, tmp_path, 13) is None
        assert StepProfile.of(SPEC, None, 13) is None, "another rank, which does not say it again"
    assert caplog.messages == ["training resumes after step 13, so steps 10 to 13 are not profiled again"]


def test_the_write_is_due_after_the_last_step_on_every_rank(tmp_path: Path) -> None:
    for folder in (tmp_path / "profiles", None):
        profile = StepProfile.of(SPEC, folder, 8)
        assert profile is not None
        assert take(profile, 9, 10, 11, 12, 13, 14) == [False] * 4 + [True, False]


def test_an_attempt_that_is_asked_to_stop_writes_what_it_recorded(profile: StepProfile, tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        end_with(profile, Preempted("asked to stop"), 9, 10, 11)
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["steps-00000010-00000011.trace.json.gz"]


def test_an_attempt_that_fails_writes_nothing(profile: StepProfile, tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        end_with(profile, TrainingError("the loss is nan"), 10)
    assert not (tmp_path / "profiles").exists()


def test_a_profiler_that_does_not_start_does_not_stop_training(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_self: object) -> None:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(torch.profiler.profile, "__enter__", fail)
    with profile:
        assert take(profile, 10, 11, 12, 13) == [False, False, False, True], "other ranks wait after the last step"
        profile.write()
    assert caplog.messages == ["steps 10 to 13 are not profiled, training continues: another profiler is active"]


def test_half_a_trace_is_not_taken_for_one(
    profile: StepProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_half(_self: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "X", "cat"')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write_half)
    with profile:
        take(profile, 10, 11, 12, 13)
        profile.write()
    assert "the trace of steps 10 to 13 is not written, training continues: " in caplog.text
    assert list((tmp_path / "profiles").iterdir()) == []
