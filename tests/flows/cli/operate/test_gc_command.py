"""`t5-pretrain gc` shows what no run needs, and removes it only with --free."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from flows.cli.operate import removal_commands
from infra.head.storage.garbage_collection import FinishedRun
from infra.node.storage.garbage import Garbage
from t5train.checkpoint import sidecar
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.records.digests import digest_files
from t5train.records.stage_records import Checkpoint
from tests.support.simulated_nodes import make_sidecar

NAME = f"mine-{'f' * 12}"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A complete checkpoint, and an older one that is incomplete."""
    folder = tmp_path / "work" / "runs" / "mine" / "checkpoints"
    for step in (4, 8):
        (folder / f"step-{step:08d}").mkdir(parents=True)
    (folder / "step-00000004" / "left.pt").write_bytes(bytes(2_500_000))
    sidecar.write(folder / "step-00000008", make_sidecar(0, 8, {}, 1))
    return folder


def test_gc_lists_what_no_run_needs_and_removes_it_only_with_free(
    printed: Callable[..., str], checkpoints: Path
) -> None:
    options = ("--root", "work", "--set", "cluster.lease_seconds=30")
    _, row, last = printed("gc", *options).splitlines()
    what = "runs/mine/checkpoints/step-00000004"
    assert row.split("\t") == ["this machine", what, "2.5 MB", "an incomplete checkpoint"]
    assert last == f"2.5 MB of files that no run needs: remove them with `t5-pretrain gc {' '.join(options)} --free`"
    assert printed("gc", *options, "--free").splitlines()[-1] == "1 removed"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000008"]
    assert printed("gc") == "no unneeded files found\n", "without a table"


def test_checkpoints_that_were_set_aside_are_listed_and_kept(printed: Callable[..., str], checkpoints: Path) -> None:
    aside = checkpoints.parent / "set-aside"
    aside.mkdir()
    (checkpoints.parents[1] / "other" / "set-aside").mkdir(parents=True)  # empty, so not listed
    (checkpoints / "step-00000004").rename(aside / "step-00000004.0123abcd")
    _, row, last = printed("gc", "--free").splitlines()
    assert row.split("\t")[:3] == ["this machine", "runs/mine/set-aside", "2.5 MB"]
    assert "remove it yourself" in row
    assert last == "0 removed"
    assert (aside / "step-00000004.0123abcd" / "left.pt").exists()


def test_gc_accepts_any_number_of_hosts_and_only_settings_of_machines(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("".join(f"nowhere{number}.invalid slots=1\n" for number in range(3)))
    assert t5_pretrain("gc", "--hostfile", "hosts", "--set", "cluster.spares=1", "--set", "cluster.ssh_port=2222") == 1
    output = capsys.readouterr().err
    assert all(f"left out: nowhere{number}.invalid: " in output for number in range(3)), output
    assert t5_pretrain("gc", "--set", "optimizer.seed=1") == 2
    assert "unknown setting 'optimizer.seed'" in capsys.readouterr().err


@pytest.fixture
def freed(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for what frees a host, which holds garbage of a finished run."""
    run, free_on = checkpoints.parent, Mock(return_value={"a": []})
    files = digest_files(run, [str(path.relative_to(run)) for path in checkpoints.glob("step-00000008/*")])
    Checkpoint(path=run, fingerprint="f" * 64, step=8, tag="step-00000008", files=files).commit()
    garbage = {"a": [Garbage(f"runs/{NAME}", 9, "the head has it")]}
    monkeypatch.setattr(removal_commands, "garbage_on", lambda *_: garbage)
    monkeypatch.setattr(removal_commands, "free_on", free_on)
    return free_on


def test_hosts_keep_a_finished_run_if_the_heads_copy_is_damaged(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], checkpoints: Path, freed: Mock
) -> None:
    (damaged,) = checkpoints.glob("step-00000008/*")
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert t5_pretrain("gc") == 0, "without --free only sizes are compared, and they are right"
    assert t5_pretrain("gc", "--free") == 0
    assert f"kept on all hosts: {NAME}, because the head's copy is not complete: {damaged}" in capsys.readouterr().err
    assert [str(damaged) in run.fault for run in freed.call_args.args[1]] == [True]


def test_hosts_keep_a_run_that_begins_again_while_the_heads_copy_is_verified(
    t5_pretrain: Callable[..., int], checkpoints: Path, freed: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(runs: list[FinishedRun], *_: object) -> list[FinishedRun]:
        ask_to_begin_again(checkpoints.parent)
        return runs

    monkeypatch.setattr(removal_commands, "verified", read)
    assert t5_pretrain("gc", "--free") == 0
    freed.assert_called_once()
    assert freed.call_args.args[1] == []
