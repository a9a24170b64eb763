"""Predicting in processes of its own: any number of them, and killed ones, give the same bytes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from t5train.inference.predict.prediction import PredictJob, predict
from t5train.inference.predict.predictions import PREDICTIONS
from t5train.inference.text.decoding import GenerationSpec
from tests.support.prepared_python import prepared_python
from tests.support.waiting import await_that

ROWS = 600
PYTHON = sys.executable
"""The real one, for processes that are killed as a group: those of ``quick_predictors`` have sessions of their own."""
PREDICT = """
import sys
from pathlib import Path
from t5train.inference.predict.prediction import PredictJob, predict
from t5train.inference.text.decoding import GenerationSpec

model, file, out, batch_tokens, processes = sys.argv[1:]
spec = GenerationSpec(max_new_tokens=8)
predict(PredictJob(Path(model), [file], Path(out), spec, int(batch_tokens), "cpu", int(processes)))
"""


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Callable[[str, int], PredictJob]:
    """``job(out, processes)``: 600 short sources in 19 parts."""
    words = " ".join(topics.values()).split()
    rows = [{"source": " ".join(words[3 * number : 3 * number + 2 + number % 6])} for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def job(out: str, processes: int) -> PredictJob:
        file, spec = f"{tmp_path}/rows.jsonl#prefix=", GenerationSpec(max_new_tokens=8)
        return PredictJob(model, [file], tmp_path / out, spec, 400, "cpu", processes)

    return job


@pytest.fixture
def quick_predictors(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import once what the processes of this test import, which takes longer than what they compute."""
    modules = ["t5train.inference.predict.prediction_worker", "transformers.models.auto.modeling_auto"]
    modules += ["transformers.models.auto.tokenization_auto", "transformers.models.t5.modeling_t5"]
    with prepared_python(tmp_path_factory.mktemp("python"), modules, {}) as python:
        monkeypatch.setattr(sys, "executable", python)
        yield


def _begin(job: PredictJob) -> "subprocess.Popen[bytes]":
    given = [job.model, *job.files, job.out, job.batch_tokens, job.processes]
    return subprocess.Popen([PYTHON, "-c", PREDICT, *map(str, given)], start_new_session=True)


def _has_parts(job: PredictJob, least: int, process: "subprocess.Popen[bytes]") -> bool:
    return len(list(job.out.glob("part-*.jsonl"))) >= least or process.poll() is not None


@pytest.mark.slow
@pytest.mark.usefixtures("quick_predictors")
def test_one_process_three_and_killed_ones_give_the_same_bytes(
    job: Callable[[str, int], PredictJob], request: pytest.FixtureRequest
) -> None:
    one = job("one", 1)
    predicted = predict(one)
    assert predict(job("three", 3)) == predicted
    killed = job("killed", 2)
    for done in range(1, 1 + int(request.config.getoption("--kill-rounds"))):
        process = _begin(killed)
        await_that(partial(_has_parts, killed, done, process))
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL or done > 1, "it ended before it was killed"
    assert predict(killed) == predicted
    assert len({(each.out / PREDICTIONS).read_bytes() for each in (one, job("three", 3), killed)}) == 1
