"""The console script, run in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import __main__


@pytest.fixture
def t5_pretrain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run the script in this process, in an empty folder; returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["t5-pretrain", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return int(ended.value.code or 0)

    return run
