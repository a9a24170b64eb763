"""Modules in the user's current folder replace no module of ours or of a library."""

import time
from pathlib import Path

import pytest

from flows.cli.operate import worker_command
from infra.node.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of such names, and no Prefect server that could be found."""
    for module in ("flows", "infra", "json", "prefect"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    return tmp_path


def test_modules_in_the_current_folder_do_not_shadow_those_of_the_worker(
    shadows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_command, "STOP_SECONDS", 0.1)
    log = shadows / "worker.log"
    with worker_command.worker_process("somebody@here", log) as worker:
        deadline = time.monotonic() + 60
        while worker.poll() is None and not log.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
    assert log.read_text()
    assert "shadowed" not in log.read_text()
