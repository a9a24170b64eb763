"""A checkpoint that is written while training goes on: its errors end the run, and whoever needs it waits for it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from t5train.checkpoint import running_save
from t5train.checkpoint.running_save import RunningSave
from t5train.errors import StorageError
from t5train.files import heartbeat
from t5train.files.heartbeat import Heartbeat
from t5train.spec import DeadlinesSpec

SECONDS = 60.0


class Ranks:
    """What other ranks and the disk see of a save, in order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.may_write, self.beat_file = threading.Event(), folder / "beat"
        for name in ("note_saved", "prune"):
            monkeypatch.setattr(running_save, name, lambda _job, step, name=name: self.seen.append((name, step)))
        monkeypatch.setattr(running_save, "barrier", lambda: self.seen.append("barrier"))
        self.save = RunningSave(Mock(), Heartbeat(self.beat_file, dict(DeadlinesSpec())))

    def write(self) -> None:
        assert self.may_write.wait(SECONDS)
        self.seen.append("written")

    def saved_step(self) -> int | None:
        beat = heartbeat.read(self.beat_file)
        assert beat is not None
        return beat.save_step


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, monkeypatch)
    yield ranks
    ranks.may_write.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_complete_only_when_all_ranks_say_so(
    ranks: Ranks,
) -> None:
    ranks.save.begin(7, ranks.write)
    assert not ranks.save.is_written()
    assert ranks.saved_step() == 7
    ranks.may_write.set()
    assert ranks.save._work is not None
    ranks.save._work.result(SECONDS)
    assert ranks.save.is_written()
    assert ranks.saved_step() is None
    assert ranks.seen == ["written"]
    ranks.save.conclude()
    assert not ranks.save.is_written(), "it is concluded once"
    ranks.save.finish()
    assert ranks.seen == ["written", ("note_saved", 7), ("prune", 7)]


def test_training_does_not_wait_for_the_disk_when_a_checkpoint_is_recorded(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_in = list[threading.Thread]()
    monkeypatch.setattr(running_save, "note_saved", lambda *_: recorded_in.append(threading.current_thread()))
    ranks.save.begin(7, Mock())
    assert ranks.save._work is not None
    ranks.save._work.result(SECONDS)
    ranks.save.conclude()
    ranks.save.finish()
    assert recorded_in
    assert threading.main_thread() not in recorded_in


def test_an_error_of_recording_a_checkpoint_ends_the_run_after_a_step(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_save, "note_saved", Mock(side_effect=StorageError("the disk is full")))
    ranks.save._step = 7
    ranks.save.conclude()
    assert ranks.save._work is not None
    ranks.save._work.exception(SECONDS)
    with pytest.raises(StorageError, match="the disk is full"):
        ranks.save.is_written()


def test_whoever_needs_the_checkpoint_waits_until_all_ranks_have_written_it(ranks: Ranks) -> None:
    ranks.save.begin(7, ranks.write)
    ranks.may_write.set()
    ranks.save.finish()
    assert ranks.seen == ["written", "barrier", ("note_saved", 7), ("prune", 7)]
    ranks.save.finish()
    assert ranks.seen[4:] == [], "nothing is left to wait for"


@pytest.mark.parametrize("found_by", ["step", "wait"])
def test_an_error_of_the_thread_is_raised_where_training_can_end_with_it(ranks: Ranks, found_by: str) -> None:
    failure = StorageError("/data/runs/small: no space left on device; free some space there")
    ranks.save.begin(7, Mock(side_effect=failure))
    assert ranks.save._work is not None
    assert ranks.save._work.exception(SECONDS) is failure
    with pytest.raises(StorageError) as raised:
        ranks.save.is_written() if found_by == "step" else ranks.save.finish()
    assert raised.value is failure
    assert ranks.seen == [], "the checkpoint is not complete"
