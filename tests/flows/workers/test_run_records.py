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
import pytest

from flows.workers import run_records
from t5train.errors import RunLocked

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


def test_records_of_other_machines_are_ignored(tmp_path: Path) -> None:
    run = uuid4()
    (tmp_path / str(run)).write_text(f'["{uuid4()}", "another-machine", "{uuid4()}"]')
    with run_records.abandoned(tmp_path) as found:
        assert found == {}


def test_an_empty_record_that_is_still_being_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / str(uuid4())).touch()
    with run_records.abandoned(tmp_path) as found:
        assert found == {}


def test_a_missing_folder_has_no_records(tmp_path: Path) -> None:
    assert run_records.living(tmp_path / "none") == set()
    with run_records.abandoned(tmp_path / "none") as found:
        assert found == {}


def test_other_files_among_the_records_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt~").write_text("mine")
    with run_records.abandoned(tmp_path) as found:
        assert found == {}
    assert run_records.living(tmp_path) == set()
    assert (tmp_path / "notes.txt~").exists()


def test_a_second_worker_of_a_user_on_one_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_records, "_LOCK_SECONDS", 0.0)
    with run_records.only_worker(tmp_path) as name:
        assert name.endswith(f"@{socket.gethostname()}")
        with pytest.raises(RunLocked, match="another worker"), run_records.only_worker(tmp_path):
            pass
    with run_records.only_worker(tmp_path):
        assert run_records.living(tmp_path) == set()
