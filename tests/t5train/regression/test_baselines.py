"""Accepted baselines: by case and machine, newest first, and never overwritten."""

from pathlib import Path

import pytest

from t5train.errors import RegressionError
from t5train.regression.baselines import Baselines, changed_versions, machine_key, require_reason
from tests.support.night_cases import MACHINE, case_result


@pytest.fixture
def baselines(tmp_path: Path) -> Baselines:
    return Baselines(tmp_path / "baselines")


def test_the_newest_baseline_of_the_case_and_machine_counts(baselines: Baselines) -> None:
    other = MACHINE | {"torch": "2.99"}
    baselines.accept("1", case_result("moe"), "first")
    baselines.accept("2", case_result("smoke"), "another case")
    baselines.accept("3", case_result("moe", machine=other), "another torch")
    newest = baselines.accept("4", case_result("moe"), "faster")
    assert baselines.newest("moe", MACHINE) == newest
    found = baselines.newest("moe", other)
    assert found is not None
    assert found.why == "another torch"
    assert baselines.newest("moe", MACHINE | {"ranks": "4"}) is None


def test_a_machine_with_other_versions_has_the_newest_baseline_of_the_same_hardware(baselines: Baselines) -> None:
    old, new = MACHINE | {"torch": "2.12.0"}, MACHINE | {"torch": "2.13.0"}
    before = baselines.accept("1", case_result("moe", machine=old), "first")
    assert baselines.newest("moe", new) == before, "the night after an upgrade"
    baselines.accept("2", case_result("moe", machine=MACHINE | {"torch": "2.11.0", "cores": "4"}), "other hardware")
    assert baselines.newest("moe", new) == before
    after = baselines.accept("3", case_result("moe", machine=new), "torch 2.13")
    assert baselines.newest("moe", new) == after
    assert baselines.newest("moe", old) == before, "the night after a downgrade"
    assert baselines.newest("moe", MACHINE | {"torch": "2.14.0"}) == after


@pytest.mark.parametrize("name", ["processor", "cores", "ranks", "device", "hosts"])
def test_another_machine_has_no_baseline(baselines: Baselines, name: str) -> None:
    machine = machine_key(2, "cpu", "a:1 b:1")
    baselines.accept("1", case_result("moe", machine=machine), "first")
    assert baselines.newest("moe", machine) is not None
    assert baselines.newest("moe", machine | {name: "another"}) is None


@pytest.mark.parametrize("name", ["python", "torch", "deepspeed", "transformers", "numpy"])
def test_another_version_is_named_and_has_a_baseline(baselines: Baselines, name: str) -> None:
    machine = machine_key(2, "cpu", "")
    baselines.accept("1", case_result("moe", machine=machine), "first")
    upgraded = machine | {name: "99.0"}
    assert baselines.newest("moe", upgraded) is not None
    assert changed_versions(machine, upgraded) == [f"{name} {machine[name]} -> 99.0"]


def test_accepting_keeps_the_history_with_reason_and_user(baselines: Baselines) -> None:
    for number in range(3):
        baselines.accept(str(number), case_result(), f"reason {number}")
    assert [one.why for one in baselines.history()] == ["reason 0", "reason 1", "reason 2"]
    assert all(one.user and one.accepted_at for one in baselines.history())
    with pytest.raises(RegressionError, match="--why is empty"):
        require_reason(" ")


def test_a_damaged_baseline_is_named(baselines: Baselines) -> None:
    baselines.accept("1", case_result(), "first")
    [path] = baselines.folder.iterdir()
    path.write_text("{}")
    with pytest.raises(RegressionError, match=f"{path} is damaged"):
        baselines.newest("moe", MACHINE)
