import os
from dataclasses import replace
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


def test_an_attempt_over_hosts_is_read_back_with_what_its_machines_are_told(tmp_path: Path) -> None:
    slots = {"node1": (0, 1), "node2": (3,)}
    this = attempt.begin(tmp_path / "run", None, lease_seconds=60.0, hosts=slots, accelerator="cpu", grace_seconds=5.0)
    assert attempt.read(this.folder) == this
    there = replace(this, folder=tmp_path / "there", host="node2", slots=(3,), hosts=None)
    there.folder.mkdir()
    there.write()
    assert attempt.read(there.folder) == there


def test_an_attempts_folder_is_private(this: Attempt) -> None:
    assert this.folder.stat().st_mode & 0o077 == 0
    assert this.folder.parent.stat().st_mode & 0o077 == 0
