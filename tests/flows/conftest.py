"""The console script, run in this process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import __main__

Process = subprocess.CompletedProcess[str]


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


@pytest.fixture
def printed(t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``printed(*arguments, code=0)`` runs a command that ends with this code; returns its standard output."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        ended, output = t5_pretrain(*arguments), capsys.readouterr()
        assert ended == code, output.err
        return output.out

    return run


@pytest.fixture
def refused(t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(code, *arguments)`` runs a command that is refused in one line and prints nothing; returns the line."""

    def run(code: int, *arguments: str) -> str:
        capsys.readouterr()
        ended, output = t5_pretrain(*arguments), capsys.readouterr()
        assert (ended, output.out) == (code, ""), output.err
        assert output.err.startswith("error: ")
        assert output.err.count("\n") == 1
        return output.err

    return run


@pytest.fixture
def run_without(run_python: Callable[..., Process]) -> Callable[..., Process]:
    """``run_without("torch prefect", *arguments)`` runs the script in a process that cannot import these packages."""

    def run(packages: str, *arguments: str, calls: str = "main()") -> Process:
        missing = f"import sys\nfor name in {packages.split()}: sys.modules[name] = None\n"
        script = f"sys.argv[0] = 't5-pretrain'\nfrom flows.cli.__main__ import main\n{calls}"
        return run_python(missing + script, *arguments)

    return run
