"""`t5-pretrain gc` shows what no run needs, and removes it only when it is told to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from t5train import sidecar
from tests.infra.node_store.conftest import make_sidecar


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A whole checkpoint, and an older one that never was."""
    folder = tmp_path / "work" / "runs" / "mine" / "checkpoints"
    for step in (4, 8):
        (folder / f"step-{step:08d}").mkdir(parents=True)
    (folder / "step-00000004" / "left.pt").write_bytes(bytes(2_500_000))
    sidecar.write(folder / "step-00000008", make_sidecar(0, 8, {}, 1))
    return folder


def test_gc_shows_first_and_removes_when_told(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], checkpoints: Path
) -> None:
    assert t5_pretrain("gc") == 0
    _, row, last = capsys.readouterr().out.splitlines()
    what = "runs/mine/checkpoints/step-00000004"
    assert row.split("\t") == ["this machine", what, "2.5 MB", "a checkpoint that is not whole"]
    assert last == "2.5 MB that no run needs: `t5-pretrain gc --free` removes it"
    assert t5_pretrain("gc", "--free") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 removed"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000008"]
    assert t5_pretrain("gc") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "there is nothing that no run needs"


def test_a_host_that_does_not_answer_is_told(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("nowhere.invalid slots=1\n")
    assert t5_pretrain("gc", "--hostfile", "hosts") == 1
    assert "left out: nowhere.invalid: " in capsys.readouterr().err
