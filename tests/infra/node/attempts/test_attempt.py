import os
from dataclasses import replace
from pathlib import Path

import pytest

from infra.node.attempts import attempt, exit_record
from infra.node.attempts.attempt import Attempt, now
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.processes import ProcessIdentity
from t5train.errors import StorageError


def test_attempts_are_numbered_in_order_and_have_unique_run_ids(tmp_path: Path) -> None:
    head = ProcessIdentity.of(os.getpid())
    made = [attempt.begin(tmp_path / "run", head) for _ in range(3)]
    assert [one.folder.name for one in made] == ["0001", "0002", "0003"]
    assert len({one.run_id for one in made}) == 3


def test_an_attempt_and_its_copy_on_a_host_are_private_and_read_back_unchanged(tmp_path: Path) -> None:
    slots = {"node9": (0, 1), "node10": (3,)}
    this = attempt.begin(tmp_path / "run", None, lease_seconds=60.0, hosts=slots, accelerator="cpu", grace_seconds=5.0)
    assert (found := attempt.read(this.folder)) == this
    assert (this.folder.stat().st_mode | this.folder.parent.stat().st_mode) & 0o077 == 0
    assert list(found.hosts or ()) == list(slots)  # the order of ranks
    there = replace(this, folder=tmp_path / "there", host="node10", slots=(3,), hosts=None)
    there.folder.mkdir()
    there.write()
    assert attempt.read(there.folder) == there


def test_an_exit_record_is_written_even_if_the_disk_is_full(this: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("no room")

    this.reserve_exit("rank-00000")
    monkeypatch.setattr(exit_record, "write_json", full)
    record = ExitRecord("rank-00000", 1, Cause.EXITED, "exited", now(), now(), "node1", 2, 0)
    this.write_exit(record)
    assert this.exit_record("rank-00000") == record
