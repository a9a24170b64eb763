import os
from pathlib import Path

from infra import attempt
from infra.attempt import Attempt
from infra.processes import ProcessIdentity


def test_attempts_count_up_and_stay(tmp_path: Path) -> None:
    head = ProcessIdentity.of(os.getpid())
    made = [attempt.begin(tmp_path / "run", head) for _ in range(3)]
    assert [one.folder.name for one in made] == ["0001", "0002", "0003"]
    assert len({one.run_id for one in made}) == 3


def test_an_attempt_is_read_back_from_its_folder(this: Attempt) -> None:
    assert attempt.read(this.folder) == this


def test_an_attempts_folder_is_private(this: Attempt) -> None:
    assert this.folder.stat().st_mode & 0o077 == 0
    assert this.folder.parent.stat().st_mode & 0o077 == 0
