"""kill -9 of the flow, the launcher and a rank, for real, at random steps: nothing is left over, and nothing is lost.

``pytest tests/flows/test_kill.py --kill-rounds 3`` kills each at three random steps, and prints the figures in
benchmarks/results/kills_of_a_run.json; ``--kill-variant moe`` kills another variant.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.node.attempts.attempt import Attempt, attempt_folder, read
from infra.node.attempts.exit_record import Cause
from infra.node.attempts.run_lock import holder
from infra.node.attempts.shared_memory import SEGMENTS
from infra.node.processes import find, in_run, in_session
from t5train.checkpoint import tags
from t5train.files.run_folder import CHECKPOINTS, step_of
from t5train.records import metrics
from t5train.spec.recipes import recipe
from tests.support import paced_training
from tests.support.generated_text import TINY, make_shards, write_jsonl
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow

NUM_STEPS, SAVED_EVERY = 40, 5
SETTINGS = TINY | {
    "optimizer.global_batch_sequences": 16,
    "optimizer.num_steps": NUM_STEPS,
    "layout.micro_batch_sequences": 8,
    "storage.checkpoint_every_steps": SAVED_EVERY,
    "storage.validate_every_steps": 20,
    "cluster.retries": 3,
}
SHALLOW = {"model.num_layers": 1, "model.num_decoder_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "zero1": SHALLOW,
    "pipeline": {"layout.pipeline_stages": 2, "layout.micro_batch_sequences": 4},
    "moe": {
        "model.version": "v1.0",
        "model.moe.num_experts": 4,
        "layout.zero_stage": 2,
        "layout.expert_parallel_size": 2,
    },
    "zero2_offload": {"layout.zero_stage": 2, "layout.offload": "optimizer"},
    "zero3": {"layout.zero_stage": 3, "layout.offload": "all"},
}
NEVER_REACHED = 1000
"""So many steps that a paced run does not end while a test waits on a busy machine."""
SAVED_ONLY_ON_SIGNAL = SHALLOW | {
    "optimizer.num_steps": NEVER_REACHED,
    "storage.checkpoint_every_steps": NEVER_REACHED,
}
ALLOWED_SECONDS = 20
RUN, TEXT = "killed", "text.jsonl"


def _text(data: Path) -> dict[str, Any]:
    return {"corpus.source": str(data / TEXT)}


def _command(root: Path, settings: dict[str, Any], command: str = "run") -> list[str]:
    changes = [argument for name, value in (SETTINGS | settings).items() for argument in ("--set", f"{name}={value}")]
    program = [sys.executable, "-c", "from flows.cli.__main__ import main; main()"]
    return [*program, command, "smoke", "--root", str(root), "--name", RUN, *changes]


@contextmanager
def _started(
    root: Path, settings: dict[str, Any], command: str = "run", *, is_paced: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run. A paced one trains so slowly that it cannot end before it is killed."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    if is_paced:
        pipes["env"] = os.environ | paced_training.environment_of(root / "paces")
    with open(root / "output.log", "ab") as log:
        process = subprocess.Popen(_command(root, settings, command), cwd=root, stdout=log, stderr=log, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _finish(process: subprocess.Popen[bytes], root: Path) -> None:
    assert process.wait(timeout=300) == 0, (root / "output.log").read_text()[-4000:]


def _final_weights(root: Path) -> Any:
    return json.loads((root / "runs" / RUN / "witness/witness.json").read_text())["tensors"]


@pytest.fixture(scope="module")
def variant(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--kill-variant"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with text, vocabulary and shards, but without runs."""
    root = tmp_path_factory.mktemp("data")
    write_jsonl(root / TEXT, 1000)
    spec = recipe("smoke").with_settings(SETTINGS | _text(root))
    make_shards(spec, root)
    return root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path, variant: str) -> Any:
    """Digests of the final weights of an undisturbed run. Only its training stage is needed for them."""
    root = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(data, root, dirs_exist_ok=True)
    with _started(root, VARIANTS[variant] | _text(data), "train") as process:
        _finish(process, root)
    return _final_weights(root)


@pytest.fixture
def root(tmp_path: Path, new_home: Callable[[Path], Path]) -> Path:
    """A root without runs, with the home of a server."""
    new_home(tmp_path / "prefect")
    return tmp_path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--kill-rounds")))


def test_a_run_killed_three_times_leaves_nothing_and_ends_with_the_same_weights(
    root: Path, data: Path, undisturbed: Any, variant: str, seed: int, kill_table: list[str]
) -> None:
    steps = sorted(random.Random(seed).sample(range(2, NUM_STEPS - 2), 3))
    run = root / "runs" / RUN
    settings = VARIANTS[variant] | _text(data)
    shutil.copytree(data, root, dirs_exist_ok=True)
    with _started(root, settings, is_paced=True) as flow:
        rank_gone = _kill("rank", _wait_for(run, steps[0], 1), flow)
        launcher_gone = _kill("launcher", _wait_for(run, steps[1], 2), flow)
        flow_gone = _kill("flow", _wait_for(run, steps[2], 3), flow)
    with _started(root, settings) as flow:
        _finish(flow, root)
    resumed = [json.loads((attempt_folder(run, n) / "spec.json").read_text())["resume_tag"] for n in (2, 3, 4)]
    # At a kill, the save of the last due step may be unfinished, but never that of the one before.
    for step, tag in zip(steps, resumed, strict=True):
        assert (0 if tag is None else int(tag[-8:])) >= step - step % SAVED_EVERY - SAVED_EVERY
    assert _states_in_prefect(root) == ["CRASHED", "COMPLETED"]
    same = _final_weights(root) == undisturbed
    for victim, step, gone, tag in zip(
        ("rank", "launcher", "flow"), steps, (rank_gone, launcher_gone, flow_gone), resumed, strict=True
    ):
        kill_table.append(f"| {victim} | {step} | {gone:.1f} s | {tag or 'start'} | {'yes' if same else 'NO'} |")
    assert same


def _states_in_prefect(root: Path) -> list[str]:
    """The states of the flow runs in Prefect's database, oldest first."""
    with closing(sqlite3.connect(root / "prefect/prefect.db")) as database:
        return [state for (state,) in database.execute("SELECT state_type FROM flow_run ORDER BY created")]


def test_a_run_saves_on_sigterm_and_a_rank_stopped_by_sigstop_is_detected(root: Path, data: Path) -> None:
    run = root / "runs" / RUN
    settings = SAVED_ONLY_ON_SIGNAL | _text(data)
    shutil.copytree(data, root, dirs_exist_ok=True)
    with _started(root, settings, is_paced=True) as flow:
        os.kill(_pid(_wait_for(run, 5, 1), "rank-00001", "process"), signal.SIGTERM)
        os.kill(_pid(_wait_for(run, 3 + _resumed_from(run, 2), 2), "launcher", "process"), signal.SIGTERM)
        stopped = _wait_for(run, 3 + _resumed_from(run, 3), 3)
        os.kill(_pid(stopped, "rank-00000", "process"), signal.SIGSTOP)
        _resumed_from(run, 4)
        # The stopped attempt's metrics stay until the next attempt has written its own.
        _wait_for(run, 3 + _last_step(run), 4)
        flow.terminate()
        assert flow.wait(300) == -signal.SIGTERM
    output = (root / "output.log").read_text()
    # No checkpoint is due before the end: each was saved because of a signal.
    first, second, third = (_resumed_from(run, number) for number in (2, 3, 4))
    last = max(map(step_of, tags.complete_tags(run / CHECKPOINTS)))
    assert 5 <= first < second == third < last < NEVER_REACHED
    assert all(f"stopped after step {step} and saved it" in output for step in (first, second, last))
    record = stopped.exit_record("rank-00000")
    assert record is not None
    assert record.cause == Cause.BEAT
    assert "no sign of life for 11 s" in output


def _resumed_from(run: Path, number: int) -> int:
    """The step of the checkpoint that attempt ``number`` resumes from. Waits until the attempt has begun."""
    spec, deadline = attempt_folder(run, number) / "spec.json", time.monotonic() + 300
    while not spec.exists():
        assert time.monotonic() < deadline, (
            f"{spec} was not written: {(run.parents[1] / 'output.log').read_text()[-4000:]}"
        )
        time.sleep(0.05)
    return int(json.loads(spec.read_text())["resume_tag"][-8:])


def _pid(attempt: Attempt, name: str, role: str) -> int:
    return int(json.loads((attempt.folder / f"{name}.pid").read_text())[role]["pid"])


def test_a_second_start_is_refused_while_the_first_is_running(root: Path) -> None:
    with _started(root, {}) as flow:
        await_that(lambda: str(flow.pid) in (holder(root / "runs" / RUN) or ""))
        command = _command(root, {})
        again = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 6
    assert str(flow.pid) in again.stderr
    assert again.stderr.strip().splitlines()[-1].startswith("error: ")
    assert not (root / "runs" / RUN / "attempts/0002").exists()
    assert "watch the run at" not in again.stderr, "it looked for a server, which may take a while to start"


def _wait_for(run: Path, step: int, number: int) -> Attempt:
    """Wait until attempt ``number`` has taken a step; return the attempt."""
    folder, deadline = attempt_folder(run, number), time.monotonic() + 300  # ample, for machines that do other work too
    while time.monotonic() < deadline:
        if (folder / "rank-00001.pid").exists() and _last_step(run) >= step:
            return read(folder)
        time.sleep(0.02)
    raise AssertionError(f"{folder} did not reach step {step}: {(run.parents[1] / 'output.log').read_text()[-4000:]}")


def _last_step(run: Path) -> int:
    lines = metrics.read(run / "metrics.jsonl")
    return int(lines[-1]["step"] or 0) if lines else 0


def _kill(victim: str, attempt: Attempt, flow: subprocess.Popen[bytes]) -> float:
    """Kill a process; return the seconds until no process and no shared memory of the attempt is left."""
    assert len(_segments(attempt)) == 2
    names = {"rank": "rank-00001", "launcher": "launcher"}
    if victim == "flow":
        os.kill(flow.pid, signal.SIGKILL)
    else:
        os.kill(_pid(attempt, names[victim], "process"), signal.SIGKILL)
    started = time.monotonic()
    of_flow = in_session(flow.pid) if victim == "flow" else in_run(attempt.run_id)  # Prefect's server, too
    while left := [*find(in_run(attempt.run_id)), *find(of_flow), *_segments(attempt)]:
        assert time.monotonic() - started < ALLOWED_SECONDS, f"{left} of {attempt.run_id} are left"
        time.sleep(0.1)
    return time.monotonic() - started


def _segments(attempt: Attempt) -> list[Path]:
    """DeepSpeed's shared memory of the attempt's ranks."""
    port = attempt.log("launcher").read_text().partition("--master_port=")[2].split()[0]
    return list(SEGMENTS.glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


@pytest.fixture(scope="module")
def kill_table(pytestconfig: pytest.Config) -> Iterator[list[str]]:
    """Rows for the documentation, printed when all rounds are done."""
    rows: list[str] = []
    yield rows
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        head = "| killed | at step | all gone after | resumed from | final weights bit-equal |\n|---|---|---|---|---|\n"
        sys.stdout.write(f"\n{head}" + "\n".join(rows) + "\n")
