"""The peak memory that is reported includes what only the first steps allocate, such as the memory of CUDA graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from t5train.engine import engine
from t5train.spec.recipes import recipe
from t5train.train import peak_flops, step_benchmark
from t5train.train.step_benchmark import WARM_UP_STEPS, BenchmarkJob, StepTime

STATE, ACTIVATIONS, UNUSED = 10 << 30, 20 << 30, 3 << 30
RECORDED_STEP = 3


class Recorder:
    """An accelerator whose allocator counts activations only while a graph is recorded, as torch's does."""

    def __init__(self) -> None:
        self._live = self._peak = STATE
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps <= RECORDED_STEP:
            self._peak = max(self._peak, STATE + ACTIVATIONS)

    def max_memory_allocated(self) -> int:
        return self._peak

    def max_memory_reserved(self) -> int:
        return STATE + ACTIVATIONS + UNUSED

    def reset_peak_memory_stats(self) -> None:
        self._peak = self._live


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    fake = Recorder()
    monkeypatch.setattr(engine, "get_accelerator", lambda: fake)
    return fake


def test_the_peak_of_a_later_step_includes_the_activations_of_recorded_graphs(recorder: Recorder) -> None:
    peaks = []
    for _ in range(RECORDED_STEP + 2):
        recorder.step()
        peaks.append(engine.accelerator_memory_bytes())
    assert peaks == [STATE + ACTIVATIONS] * len(peaks)


def test_a_benchmark_reports_the_peak_of_recording(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*_: object) -> Iterator[StepTime]:
        while True:
            recorder.step()
            yield StepTime(0.1, 0.0)

    monkeypatch.setattr(step_benchmark, "_steps", steps)
    monkeypatch.setattr(step_benchmark, "_profile", lambda *_: {})
    monkeypatch.setattr(peak_flops, "accelerator_name", lambda: "a GPU")
    job = BenchmarkJob(spec=recipe("base"), vocab_size=32_100, steps=2)
    measured = step_benchmark.measure(job, Path("unused"))
    assert recorder.steps == WARM_UP_STEPS + job.steps
    assert measured.memory_bytes == STATE + ACTIVATIONS
    assert measured.reserved_bytes == STATE + ACTIVATIONS + UNUSED
