"""Records of flow runs: those of killed processes are found; those of live ones or other machines are left alone."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from flows.workers import run_records
from t5train.errors import RunLocked

HOLDS = """
import sys
from pathlib import Path
from uuid import UUID
from flows.workers import run_records

run_records.hold(Path(sys.argv[1]), UUID(sys.argv[2]), UUID(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def working_on(folder: Path, run: UUID, state: UUID) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDS, str(folder), str(run), str(state)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_is_abandoned_only_after_its_process_is_killed(tmp_path: Path) -> None:
    run, state = uuid4(), uuid4()
    with working_on(tmp_path, run, state):
        assert run_records.living(tmp_path) == {run}
        with run_records.abandoned(tmp_path) as found:
            assert found == {}
    assert run_records.living(tmp_path) == set()
    with run_records.abandoned(tmp_path) as found:
        assert found[run].state_id == str(state)
    run_records.forget(tmp_path, run)
    with run_records.abandoned(tmp_path) as found:
        assert found == {}


def test_a_process_that_resumes_a_run_takes_over_its_record(tmp_path: Path) -> None:
    run, state = uuid4(), uuid4()
    with working_on(tmp_path, run, uuid4()):
        pass
    with working_on(tmp_path, run, state):
        assert run_records.living(tmp_path) == {run}
    with run_records.abandoned(tmp_path) as found:
        assert found[run].state_id == str(state)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (str(uuid4()), f'["{uuid4()}", "another-machine", "{uuid4()}"]'),
        (str(uuid4()), ""),
        ("notes.txt~", "mine"),
        (None, ""),
    ],
    ids=["of another machine", "being written", "another file", "no folder"],
)
def test_what_is_no_record_of_this_machine_is_ignored(tmp_path: Path, name: str | None, content: str) -> None:
    if name is not None:
        (tmp_path / name).write_text(content)
    folder = tmp_path / "none" if name is None else tmp_path
    with run_records.abandoned(folder) as found:
        assert found == {}
    assert run_records.living(folder) == set()
    assert name is None or (tmp_path / name).read_text() == content


def test_a_second_worker_of_a_user_on_one_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_records, "_LOCK_SECONDS", 0.0)
    with run_records.only_worker(tmp_path) as name:
        assert name.endswith(f"@{socket.gethostname()}")
        with pytest.raises(RunLocked, match="another worker"), run_records.only_worker(tmp_path):
            pass
    with run_records.only_worker(tmp_path):
        assert run_records.living(tmp_path) == set()
