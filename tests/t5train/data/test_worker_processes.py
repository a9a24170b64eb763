"""Worker processes: their results, and how failures are reported."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from t5train.data.worker_processes import Advance, Json, LastingProcess, in_processes
from t5train.errors import InputError, WorkerLost
from tests.support.waiting import await_that


def double(job: Json, advance: Advance) -> Json:
    advance(job["number"])
    return {"twice": 2 * job["number"], "process": os.getpid()}


def refuse(job: Json, advance: Advance) -> Json:
    raise InputError(f"é is wrong with {job['number']}")


def fail(job: Json, advance: Advance) -> Json:
    raise ZeroDivisionError


def die(job: Json, advance: Advance) -> Json:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def die_in_the_middle_of_a_line(job: Json, advance: Advance) -> Json:
    sys.stdout.write('{"result": {"twi')
    sys.stdout.flush()
    return die(job, advance)


def wait(job: Json, advance: Advance) -> Json:
    Path(job["pid_file"]).write_text(str(os.getpid()))
    time.sleep(600)
    return {}


def compute(job: Json, advance: Advance) -> Json:
    Path(job["pid_file"]).write_text(str(os.getpid()))
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        pass
    return {}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers import this file as a module."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.mark.parametrize("module", ["t5train.data.shard_worker", "t5train.data.segments"])
def test_worker_processes_start_without_pydantic_and_fsspec(
    run_python: Callable[..., subprocess.CompletedProcess[str]], module: str
) -> None:
    loaded = set(run_python(f"import sys, {module}; print(*sys.modules)").stdout.split())
    assert module in loaded
    assert not loaded & {"pydantic", "fsspec", "torch", "t5train.spec"}


def run(function: str, jobs: int = 4, workers: int = 2) -> list[Json]:
    advanced: list[int] = []
    numbers = [{"number": number} for number in range(jobs)]
    results = list(in_processes(f"test_worker_processes:{function}", numbers, workers, advanced.append))
    assert sum(advanced) == sum(range(jobs))
    return results


def test_every_job_is_done_once_by_other_processes() -> None:
    results = run("double", jobs=10)
    assert sorted(result["twice"] for result in results) == list(range(0, 20, 2))
    assert os.getpid() not in {result["process"] for result in results}
    assert run("double", jobs=0) == []


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("refuse", InputError, r"^é is wrong with \d$"),
        ("fail", WorkerLost, "exit status 1"),
        ("die", WorkerLost, "SIGKILL"),
        ("die_in_the_middle_of_a_line", WorkerLost, "SIGKILL"),
    ],
)
def test_a_failure_is_an_error_and_not_a_hang(function: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run(function)


@pytest.mark.parametrize("function", ["wait", "compute"])
def test_no_worker_outlives_the_program_that_started_it(function: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from t5train.data.worker_processes import in_processes\n"
        "list(in_processes('test_worker_processes:' + sys.argv[3], [{'pid_file': sys.argv[2]}], 1, lambda units: None))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(pid_file), function]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        try:
            await_that(lambda: pid_file.exists() and pid_file.read_text())
            worker = psutil.Process(int(pid_file.read_text()))
        finally:
            parent.kill()
    assert worker.wait(timeout=300) is None or not worker.is_running()


def test_a_worker_whose_results_nobody_reads_ends_without_an_exception_that_could_be_retried() -> None:
    code = (
        "import os\n"
        "from t5train.data.worker_processes import _answer\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)\n"
        "try: _answer({})\n"
        "except OSError: os._exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


def test_a_lasting_process_does_one_job_after_another_and_reports_their_errors() -> None:
    advanced: list[int] = []
    with closing(LastingProcess("test_worker_processes:double")) as process:
        first, second = (process.do({"number": number}, advanced.append) for number in (3, 4))
    assert (first["twice"], second["twice"], advanced) == (6, 8, [3, 4])
    assert first["process"] == second["process"] != os.getpid()
    with (
        closing(LastingProcess("test_worker_processes:refuse")) as process,
        pytest.raises(InputError, match="is wrong with 5"),
    ):
        process.do({"number": 5}, advanced.append)


def test_a_lasting_process_that_is_killed_keeps_no_thread_waiting(tmp_path: Path) -> None:
    begun = tmp_path / "pid"
    with closing(LastingProcess("test_worker_processes:wait")) as process, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(process.do, {"pid_file": str(begun)}, int)
        await_that(begun.exists)
        process.kill()
        assert isinstance(waiting.exception(), WorkerLost)


def test_ctrl_c_in_a_terminal_ends_no_worker_not_even_one_that_has_just_been_started() -> None:
    with closing(LastingProcess("test_worker_processes:double")) as process:
        process._worker.send_signal(signal.SIGINT)
        assert process.do({"number": 3}, lambda _: None)["twice"] == 6
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
