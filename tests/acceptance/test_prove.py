"""The record of proofs: what is due, and what an interrupted or failed proof leaves behind."""

import subprocess
from pathlib import Path

import pytest

from tests.acceptance.prove import COLUMNS, PAGE, PROOFS, Proof, prove
from tests.acceptance.result_table import ResultTable

HEAD = "# Proofs\n\n| proof | commit | date | minutes | result |\n|---|---|---|---|---|\n"
FIRST, SECOND = Proof("first", ["a"]), Proof("second", ["b"])


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two proofs, which count how often they have run. The second fails."""
    (tmp_path / PAGE).parent.mkdir(parents=True)
    (tmp_path / PAGE).write_text(HEAD)
    (tmp_path / "Makefile").write_text("first:\n\techo >> first.ran\nsecond:\n\techo >> second.ran; exit 3\n")
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def times(root: Path) -> list[int]:
    files = [root / f"{name}.ran" for name in ("first", "second")]
    return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


def test_a_proof_that_has_passed_is_due_again_when_its_subject_changes(root: Path) -> None:
    assert prove([FIRST], root)
    assert prove([FIRST], root)
    assert times(root) == [1, 0]
    (root / "a").write_text("2")
    git(root, "commit", "-aqm", "second")
    assert prove([FIRST], root)
    assert times(root) == [2, 0]


def test_a_proof_that_failed_is_recorded_and_due_again(root: Path) -> None:
    assert not prove([FIRST, SECOND], root)
    assert ResultTable(root / PAGE, COLUMNS).rows()["second"][-1] == "failed (2)"
    assert not prove([FIRST, SECOND], root)
    assert times(root) == [1, 2]


def test_listing_runs_nothing_and_files_that_are_not_committed_are_not_proved(root: Path) -> None:
    assert not prove([FIRST], root, list_only=True)
    (root / "a").write_text("2")
    with pytest.raises(SystemExit, match="not committed"):
        prove([FIRST], root)
    assert times(root) == [0, 0]


def test_every_proof_is_a_make_target_about_files_that_exist() -> None:
    repository = Path(__file__).parents[2]
    makefile = (repository / "Makefile").read_text()
    for proof in PROOFS:
        assert f"\n{proof.target}: " in makefile
        assert all((repository / path).exists() for path in proof.about), proof
