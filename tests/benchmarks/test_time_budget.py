"""A command starts nothing that would not end before its deadline, and is interrupted shortly before it."""

import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import time_budget
from benchmarks.measured_conditions import code_digest, commit
from benchmarks.time_budget import Ending, OutOfTime, TimeBudget
from t5train.progress import silent


def test_what_would_not_end_in_time_is_refused() -> None:
    budget = TimeBudget(110.0)
    budget.close()
    budget.require("trainer, repeat 1", 95)
    with pytest.raises(OutOfTime, match=r"trainer, repeat 1 is expected to take 105 s, but (99|100) s are left"):
        budget.require("trainer, repeat 1", 105)
    for seconds in (0, 5):
        with pytest.raises(OutOfTime, match="but 0 s are left"):
            TimeBudget(seconds).require("ours, repeat 1", 1)
    TimeBudget(None).require("ours, repeat 1", 1e9)


def test_a_measurement_that_takes_longer_than_expected_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_budget, "_ENDING_SECONDS", 0.0)
    budget = TimeBudget(0.1)
    with pytest.raises(OutOfTime, match="in progress"):
        time.sleep(30)
    budget.close()


def test_training_is_stopped_while_ranks_can_save_and_those_that_do_not_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_budget, "_ENDING_SECONDS", 0.0)
    budget = TimeBudget(0.2)

    def train() -> None:
        try:
            budget.until_saving(silent)("steps", 1, 2)
        finally:
            time.sleep(10)  # as ranks that compile

    with pytest.raises(OutOfTime) as ended:
        train()
    assert isinstance(ended.value.__context__, Ending)


def test_a_change_of_code_changes_its_digest_and_one_of_documents_does_not(tmp_path: Path) -> None:
    code, document = tmp_path / "t5train" / "module.py", tmp_path / "docs" / "measurements.md"
    digests = []
    for path, text in ((code, "1"), (document, "1"), (document, "2"), (code, "2")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
        digests.append(code_digest(tmp_path))
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_a_change_of_measured_code_since_the_commit_is_recorded(tmp_path: Path) -> None:
    code, document = tmp_path / "t5train" / "module.py", tmp_path / "benchmarks" / "results" / "result.json"
    for path in (code, document):
        path.parent.mkdir(parents=True)
    code.write_text("1", "utf-8")
    assert commit(checkout=tmp_path) == "not known", "there is no repository"
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -q -m x"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    head = commit(checkout=tmp_path)
    assert len(head) == 12
    assert commit("0123abc", tmp_path) == "0123abc"
    document.write_text("1", "utf-8")
    assert commit(checkout=tmp_path) == head
    code.write_text("2", "utf-8")
    assert commit(checkout=tmp_path) == f"{head}, changed"
