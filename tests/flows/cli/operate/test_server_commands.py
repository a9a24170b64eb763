"""What `up` prints for the user's next command."""

import sys
from pathlib import Path

import pytest

from flows.cli.operate.server_commands import _prefect


def test_the_printed_command_exists_wherever_prefect_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    monkeypatch.setattr(sys, "executable", str(python))
    assert _prefect() == f"{python} -m prefect"
    beside = python.with_name("prefect")
    beside.touch(mode=0o755)
    assert _prefect() == str(beside)
