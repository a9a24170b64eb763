import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from infra.head.launch.local_launch import LaunchSpec, command, launch
from infra.head.stop_signal import SAME_STOP_SECONDS
from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.exit_record import Cause
from infra.node.attempts.run_lock import run_lock
from infra.node.attempts.shared_memory import SEGMENTS
from t5train.errors import LaunchError, Preempted, RunLocked, SpecError, StorageError
from t5train.files.locks import try_lock
from tests.infra.conftest import Start, Survivors, Until
from tests.support.guarded_ranks import HANG_SECONDS, SAVING_SLOWLY, end_saves, saves

RANKS = "rank-00000", "rank-00001"

# Ignores SIGTERM, has a child that does so too, and makes a shared memory segment named as DeepSpeed names them.
# DeepSpeed is not imported, which would take seconds; tests.flows.test_kill checks real segments. Fails if a rank of
# another attempt still runs.
RANK = """
import fcntl, os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
place = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{rank}"
Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}").touch()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
alone = open(folder / f"alone-{rank}", "w")
fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
while not (folder / "finish").exists():
    time.sleep(0.1)
"""
HEAD = """
import sys, time
from pathlib import Path
from infra.head.launch.local_launch import LaunchSpec, launch
from infra.node.attempts.run_lock import run_lock
folder = Path(sys.argv[1])
with run_lock(folder / "run"):
    launch(LaunchSpec(lambda _folder: (str(folder / "rank.py"), str(folder)), folder / "run", 2, "cpu"))
"""

SAVING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit('saved')))
print('ready', flush=True)
time.sleep(600)
"""


def spec(tmp_path: Path, program: str, num_ranks: int = 2) -> LaunchSpec:
    (tmp_path / "rank.py").write_text(program)
    return LaunchSpec(lambda _folder: (str(tmp_path / "rank.py"), str(tmp_path)), tmp_path / "run", num_ranks, "cpu")


def test_the_command_has_the_number_of_ranks_and_the_port_and_program() -> None:
    program = LaunchSpec(lambda folder: ("-m", "t5train.train", f"{folder}/spec.json"), Path("/r"), 4, "cpu", 29500)
    argv = command(program, Path("/r/attempts/0007"))
    assert " ".join(argv) == (
        f"{sys.executable} -m infra.node.attempts.local_launcher --ranks=4 --master_port=29500 /r/attempts/0007 "
        f"{sys.executable} -m t5train.train /r/attempts/0007/spec.json"
    )


def test_a_port_in_use_or_a_read_only_folder_of_operators_is_refused_before_ranks_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SpecError, match="master_port"):
        launch(replace(spec(tmp_path, "pass"), master_port=server.getsockname()[1]))
    assert not (tmp_path / "run").exists()
    one = replace(spec(tmp_path, "", 1), operators=("cpu_adam",), environment={"TORCH_EXTENSIONS_DIR": "/proc/self"})
    with pytest.raises(StorageError, match=r"/proc/self.*, where DeepSpeed compiles its operators, cannot be written"):
        launch(one)


@pytest.mark.slow
def test_ranks_run_under_the_launcher_without_secrets_of_the_head_and_on_tick_is_called(
    tmp_path: Path, survivors: Survivors, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, "s3cret")
    program = "import os, sys, time; from pathlib import Path\n"
    program += "print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'DS_ACCELERATOR')))\n"
    program += "for pid in (os.getpid(), os.getppid()): print(Path(f'/proc/{pid}/environ').read_text())\n"
    program += "while not Path(sys.argv[1], 'ticked').exists(): time.sleep(0.02)"
    this = launch(spec(tmp_path, program), on_tick=(tmp_path / "ticked").touch)
    logs = [this.log(rank).read_text() for rank in RANKS]
    assert [log.splitlines()[0] for log in logs] == ["0 2 cpu", "1 2 cpu"]
    assert all("RANK=" in environment for log in logs for environment in log.splitlines()[1:])
    assert not any(b"s3cret" in path.read_bytes() for path in this.folder.iterdir())
    assert survivors(this.run_id) == set()


def test_no_process_but_the_ranks_own_imports_torch(
    tmp_path: Path, start: Start, survivors: Survivors, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "import sys\nfor name in ('torch', 'deepspeed', 'transformers', 'numpy'): sys.modules[name] = None\n"
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(missing)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'without'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    spec(tmp_path, "import sys; print(sys.modules['torch'])")
    assert start("-c", HEAD, str(tmp_path)).wait(HANG_SECONDS) == 0, (tmp_path / "output.txt").read_text()
    assert newest(tmp_path).log(RANKS[0]).read_text() == "None\n"
    assert survivors(newest(tmp_path).run_id) == set()


def test_ranks_start_while_their_job_is_prepared_and_are_ended_if_that_fails(
    tmp_path: Path, until: Until, survivors: Survivors
) -> None:
    def prepare(folder: Path, _look: Callable[[], None]) -> None:
        until(lambda: [attempt.read(folder).log(rank).exists() for rank in RANKS] == [True, True])
        raise StorageError("the checkpoint cannot be read")

    with pytest.raises(StorageError, match="the checkpoint cannot be read"):
        launch(replace(spec(tmp_path, "import time; time.sleep(600)"), prepare=prepare))
    assert survivors(newest(tmp_path).run_id) == set()


def test_a_head_that_is_stopped_while_it_prepares_the_job_leaves_no_rank_that_waits_for_it(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors
) -> None:
    spec(tmp_path, "import time; print('ready', flush=True); time.sleep(600)")
    head = start("-c", HEAD.replace('2, "cpu"', '2, "cpu", prepare=lambda *_: time.sleep(600)'), str(tmp_path))
    until(lambda: ready(tmp_path) or head.poll() is not None)
    head.terminate()
    assert head.wait(HANG_SECONDS) == -signal.SIGTERM
    assert survivors(newest(tmp_path).run_id) == set()
    records = [newest(tmp_path).exit_record(rank) for rank in RANKS]
    assert [record and (record.returncode, record.cause) for record in records] == [
        (-signal.SIGTERM, Cause.REQUESTED)
    ] * 2
    assert "the rank saved no checkpoint" in (tmp_path / "output.txt").read_text()


@pytest.mark.parametrize("end", ["a rank fails", "all are to stop"])
def test_the_job_is_not_prepared_to_its_end_for_ranks_that_fail_or_are_to_stop(
    tmp_path: Path, until: Until, survivors: Survivors, end: str
) -> None:
    def prepare(folder: Path, look: Callable[[], None]) -> None:
        until(lambda: [attempt.read(folder).log(rank).exists() for rank in RANKS] == [True, True])
        (folder.parents[2] / "fail").touch() if end == "a rank fails" else attempt.read(folder).order_stop()
        until(look)  # returns None until it raises

    program = "import os, sys, time\nwhile os.environ['RANK'] == '0' or not os.path.exists(sys.argv[1] + '/fail'):\n"
    failed, said = (LaunchError, "rank 1 of 2") if end == "a rank fails" else (Preempted, "saved no checkpoint")
    with pytest.raises(failed, match=said):
        launch(replace(spec(tmp_path, program + "    time.sleep(0.02)\nsys.exit('no more')"), prepare=prepare))
    assert survivors(newest(tmp_path).run_id) == set()


@pytest.mark.slow
def test_the_first_rank_that_fails_ends_the_others(tmp_path: Path, survivors: Survivors) -> None:
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no more')\ntime.sleep(600)"
    with pytest.raises(LaunchError, match=r"rank 1 of 2 ended with exit code 1\. .*attempt 0001.*\n.*no more"):
        launch(spec(tmp_path, program))
    assert survivors(newest(tmp_path).run_id) == set()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher guard", "launcher", "guard", "rank"])
def test_no_process_or_shared_memory_survives_a_kill(
    tmp_path: Path, victim: str, start: Start, until: Until, survivors: Survivors
) -> None:
    head = started(tmp_path, RANK, start, until)
    run_id = newest(tmp_path).run_id
    assert len(survivors(run_id)) == 8  # three guards, the launcher, two ranks and a child of each
    os.kill(victim_pid(tmp_path, victim), signal.SIGKILL)
    assert head.wait(HANG_SECONDS) == 1
    assert survivors(run_id) == set()
    assert segments(newest(tmp_path)) == []
    error = "RankKilled" if victim in ("guard", "rank") else "LaunchError"
    assert f"errors.{error}: " in (tmp_path / "output.txt").read_text()


@pytest.mark.slow
def test_nothing_survives_a_killed_head_and_the_next_attempt_waits_for_its_ranks_to_end(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors
) -> None:
    head = started(tmp_path, RANK, start, until)
    killed = newest(tmp_path)
    assert len(segments(killed)) == 2
    head.kill()
    (tmp_path / "finish").touch()
    again = start("-c", HEAD, str(tmp_path))  # at once: its ranks fail if one of the first head's still runs
    until(lambda: not survivors(killed.run_id) and not segments(killed))
    assert again.wait(HANG_SECONDS) == 0
    assert segments(newest(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["launcher.pid", "rank-00000.pid"])
@pytest.mark.parametrize("victim", ["head", "launcher"])
def test_no_process_survives_a_kill_during_the_start(
    tmp_path: Path, victim: str, moment: str, start: Start, until: Until, survivors: Survivors
) -> None:
    spec(tmp_path, RANK)
    head = start("-c", HEAD, str(tmp_path))
    until((tmp_path / "run" / "attempts" / "0001" / moment).exists)
    os.kill(head.pid if victim == "head" else victim_pid(tmp_path, "launcher"), signal.SIGKILL)
    head.wait(HANG_SECONDS)
    until(lambda: not survivors(newest(tmp_path).run_id))


def started(tmp_path: Path, program: str, start: Start, until: Until) -> subprocess.Popen[bytes]:
    """A head whose two ranks run a program, and have said that they are ready unless the head has ended."""
    spec(tmp_path, program)
    head = start("-c", HEAD, str(tmp_path))
    until(lambda: ready(tmp_path) or head.poll() is not None)
    return head


def segments(this: Attempt) -> list[Path]:
    """Shared memory segments of an attempt's ranks that still exist."""
    port = this.log("launcher").read_text().partition("--master_port=")[2].split()[0]
    return list(SEGMENTS.glob(f"*_127.0.0.1_{port}_*"))


def newest(tmp_path: Path) -> Attempt:
    return attempt.read(max((tmp_path / "run" / "attempts").iterdir()))


def ready(tmp_path: Path) -> bool:
    logs = list(tmp_path.glob("run/attempts/0001/rank-*.log"))
    recorded = list(tmp_path.glob("run/attempts/0001/rank-*.pid"))
    return len(recorded) == 2 and [log.read_text() for log in logs] == ["ready\n"] * 2


def victim_pid(tmp_path: Path, victim: str) -> int:
    folder = newest(tmp_path).folder
    name = "launcher" if victim.startswith("launcher") else "rank-00001"
    recorded = json.loads((folder / f"{name}.pid").read_text())
    return int(recorded["guard" if victim.endswith("guard") else "process"]["pid"])


@pytest.mark.slow
def test_sigterm_to_the_launcher_gives_all_ranks_time_to_save(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors
) -> None:
    head = started(tmp_path, SAVING, start, until)
    os.kill(victim_pid(tmp_path, "launcher"), signal.SIGTERM)
    assert head.wait(HANG_SECONDS) == 1
    assert [newest(tmp_path).log(rank).read_text() for rank in RANKS] == ["ready\nsaved\n"] * 2
    assert "errors.Preempted: " in (tmp_path / "output.txt").read_text()
    assert survivors(newest(tmp_path).run_id) == set()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_gives_ranks_time_to_save_before_the_head_ends_by_it(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors, number: signal.Signals
) -> None:
    head = started(tmp_path, SAVING, start, until)
    for _ in range(3 if number == signal.SIGINT else 1):  # wrappers repeat a Ctrl-C
        head.send_signal(number)
        time.sleep(0.1)
    assert head.wait(HANG_SECONDS) == -number
    this = newest(tmp_path)
    assert [this.log(rank).read_text() for rank in RANKS] == ["ready\nsaved\n"] * 2
    assert survivors(this.run_id) == set()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_saving_ranks(tmp_path: Path, start: Start, until: Until, survivors: Survivors) -> None:
    head = started(tmp_path, SAVING_SLOWLY, start, until)
    head.send_signal(signal.SIGINT)
    this = newest(tmp_path)
    until(lambda: saves(this, *RANKS))
    time.sleep(SAME_STOP_SECONDS)
    head.send_signal(signal.SIGINT)
    assert head.wait(HANG_SECONDS) == -signal.SIGINT
    assert [this.log(rank).read_text() for rank in RANKS] == ["ready\n"] * 2
    assert survivors(this.run_id) == set()


@pytest.mark.slow
def test_ranks_complete_the_save_of_a_stopped_head_that_is_killed_and_the_next_start_waits_for_them(
    tmp_path: Path, start: Start, until: Until, survivors: Survivors, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = started(tmp_path, SAVING_SLOWLY, start, until)
    head.terminate()
    this = newest(tmp_path)
    until(lambda: saves(this, *RANKS))
    head.kill()  # as Prefect does, 30 s after a run was cancelled
    head.wait()
    with pytest.raises(RunLocked):
        run_lock(tmp_path / "run", wait_seconds=0).__enter__()
    waits = count()

    def expiring_once(descriptor: int, seconds: float = 0.0) -> bool:
        if seconds == HANG_SECONDS:
            if not next(waits):
                return False  # as after that time
            end_saves(this)
        return try_lock(descriptor, seconds)

    monkeypatch.setattr("infra.node.attempts.run_lock.try_lock", expiring_once)
    with run_lock(tmp_path / "run", wait_seconds=HANG_SECONDS):
        assert [this.log(rank).read_text() for rank in RANKS] == ["ready\nsaved\n"] * 2
        until(lambda: not survivors(this.run_id))
