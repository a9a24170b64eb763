"""`t5-pretrain rm`: shows what it deletes, asks, and names what stays."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.node.attempts.run_lock import run_lock


class Terminal(io.StringIO):
    """Somebody at a terminal who types this."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A published run of 1,000,000 bytes and its record."""
    folder = tmp_path / "work" / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(bytes(1_000_000))
    (folder / "published.json").write_text('{"url": "s3://bucket/mine"}')
    return folder


def test_a_run_is_deleted_after_a_yes_and_what_stays_is_named(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert t5_pretrain("rm", "mine") == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split("\t") == ["this machine", str(run), "1.0 MB", "the run"]
    assert "Delete 1.0 MB (1,000,027 bytes)?" in output.err
    assert output.err.endswith("nothing was deleted\n")
    assert run.exists()
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert t5_pretrain("rm", "mine") == 0
    output = capsys.readouterr()
    stays = "stays: s3://bucket/mine, where the run is published"
    assert output.out.splitlines()[2] == stays
    assert "tokenizers and token shards" in output.out
    assert output.out.endswith(f"deleted: {run}\n")
    assert list(run.parent.iterdir()) == []


def test_without_a_terminal_a_missing_yes_is_a_wrong_usage(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert t5_pretrain("rm", "mine") == 2
    assert "Add --yes to delete its 1,000,027 bytes" in capsys.readouterr().err
    assert run.exists()
    assert t5_pretrain("rm", "mine", "--yes") == 0
    assert not run.exists()


def test_a_run_in_use_an_unknown_name_and_a_path_elsewhere_are_refused_in_one_line(
    refused: Callable[..., str], run: Path, tmp_path: Path
) -> None:
    (tmp_path / "work" / "runs" / "notes").mkdir()
    refusals = {"mime": "did you mean 'mine'?", "..": "neither the name", "notes": "not the folder of a run"}
    refusals |= {"/etc": "neither the name", "work/runs/../..": "neither the name"}
    with run_lock(run):
        for named, why in refusals.items():
            assert why in refused(4, "rm", named, "--yes")
        assert "is in use by process" in refused(6, "rm", "mine", "--yes")
    assert sorted(path.name for path in run.parent.iterdir()) == ["mine", "notes"]


def test_a_host_of_the_run_that_does_not_answer_is_named_and_can_be_left_out(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    (run / "not-begun-again.json").write_text(json.dumps(["nowhere.invalid"]))
    assert t5_pretrain("rm", "mine", "--yes") == 7
    assert "'mine' is not deleted, because nowhere.invalid did not answer" in capsys.readouterr().err
    assert run.exists()
    assert t5_pretrain("rm", "mine", "--yes", "--exclude", "nowhere.invalid") == 0
    assert not run.exists()


def test_an_interrupted_deletion_is_finished_without_asking(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    run.rename(run.with_name(".mine.discarded"))
    assert t5_pretrain("status", "mine") == 4, "it is no run any more"
    assert t5_pretrain("rm", "mine") == 0
    assert "finishing the removal of mine" in capsys.readouterr().err
    assert list(run.parent.iterdir()) == []
