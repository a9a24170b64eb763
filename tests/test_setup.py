"""``make setup`` does what is needed, reports what it cannot do, and repeats nothing."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "env", "make", "touch", "uname")
BARE_PYTHON = """#!/bin/bash
case "$*" in
    *ensurepip*) exit 1 ;;
    *'get_path("include")'*) echo /nowhere ;;
    *python%d*) echo python3.11 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files that setup reads, and a ``bin`` with only the programs in TOOLS."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-kernels.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env={"PATH": str(checkout / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_only_the_tests_install_triton(checkout: Path) -> None:
    """A demo on a machine without a GPU does not download what it does not use."""
    add_program(checkout, "python3.11", "#!/bin/bash\nexit 0\n")
    assert "--editable '.[flows,serve,s3,hub,wikipedia,vectors,dask,dev]'" in make(checkout, "-n", "demo").stdout
    assert "kernels" not in make(checkout, "-n", "demo").stdout
    assert "--editable '.[kernels]'" in make(checkout, "-n", "test").stdout
    assert "triton" not in (checkout / "constraints.txt").read_text()


@pytest.mark.parametrize("is_ci", [False, True])
def test_without_triton_tests_go_on_but_not_in_continuous_integration(checkout: Path, is_ci: bool) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    add_program(checkout, "../.venv/bin/python", "#!/bin/bash\nexit 1\n")
    (checkout / ".venv/.installed").touch()
    result = make(checkout, ".venv/.triton", *(["CI=true"] if is_ci else []))
    assert "Triton could not be installed" in result.stderr
    assert (result.returncode != 0) is is_ci
    assert (checkout / ".venv/.triton").exists() is not is_ci


def add_program(checkout: Path, name: str, script: str) -> None:
    (checkout / "bin" / name).write_text(script)
    (checkout / "bin" / name).chmod(0o755)


def test_setup_without_a_python_names_the_supported_versions(checkout: Path) -> None:
    result = make(checkout, "setup")
    assert result.returncode != 0
    assert "no Python 3.11 or 3.12 on PATH" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_that_does_not_run_is_skipped(checkout: Path) -> None:
    add_program(checkout, "python3.11", "#!/bin/bash\nexit 127\n")
    add_program(checkout, "python3.12", "#!/bin/bash\nexit 0\n")
    assert f'python="{checkout}/bin/python3.12"' in make(checkout, "-n", "setup").stdout


def test_setup_names_the_system_packages_it_may_not_install(checkout: Path) -> None:
    add_program(checkout, "python3.11", BARE_PYTHON)
    result = make(checkout, "setup")
    assert result.returncode != 0
    assert "apt-get install python3.11-venv python3.11-dev g++" in result.stderr
    assert not (checkout / ".venv").exists()


def test_setup_as_root_installs_missing_system_packages(checkout: Path) -> None:
    add_program(checkout, "python3.11", BARE_PYTHON)
    add_program(checkout, "id", "#!/bin/bash\necho 0\n")
    add_program(checkout, "apt-get", '#!/bin/bash\necho "$*" >> asked\n')
    make(checkout, "setup")
    update, install = (checkout / "asked").read_text().splitlines()
    assert update.startswith("update")
    assert install.endswith("python3.11-venv python3.11-dev g++")


def test_setup_repeats_nothing_until_a_version_changes(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    for stamp in (".installed", ".segmenter", ".ops-built"):
        (checkout / ".venv" / stamp).touch()
    assert "Nothing to be done" in make(checkout, "setup").stdout
    later = time.time() + 10
    os.utime(checkout / "constraints.txt", (later, later))
    add_program(checkout, "python3.11", "#!/bin/bash\nexit 0\n")
    planned = make(checkout, "-n", "setup").stdout
    assert "pip install" in planned
    assert "infra.node.compiled_operators" in planned
    assert "t5train.data.native.segmenter_build" in planned


def test_every_make_target_is_documented() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = (line.split()[1:] for line in text.splitlines() if line.startswith(".PHONY:"))
    command = ["make", "--no-print-directory", "help"]  # the tests may themselves be run by make
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in shown.splitlines()] == phony


def browser(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(checkout / "bin")}
    command = [str(checkout / ".ci" / "browser")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_missing_browser_for_the_tests_is_installed_as_root(checkout: Path) -> None:
    add_program(checkout, "id", "#!/bin/bash\necho 0\n")
    add_program(checkout, "apt-get", f'#!/bin/bash\necho "$*" >> {checkout}/asked\n')
    assert browser(checkout).returncode == 0
    assert (checkout / "asked").read_text().splitlines()[-1].endswith("install -qy --no-install-recommends chromium")
    add_program(checkout, "chromium", "#!/bin/bash\n")
    (checkout / "asked").unlink()
    assert browser(checkout).returncode == 0
    assert not (checkout / "asked").exists()


def test_a_browser_that_cannot_be_installed_is_not_an_error(checkout: Path) -> None:
    result = browser(checkout)
    assert result.returncode == 0
    assert "as root: apt-get install chromium" in result.stderr


def cluster_packages(checkout: Path) -> subprocess.CompletedProcess[str]:
    # Remove the folders in which this machine may have the programs.
    script = (checkout / ".ci" / "cluster-packages").read_text("utf-8")
    (checkout / ".ci" / "cluster-packages").write_text(script.replace(":/usr/sbin:/sbin", ""), "utf-8")
    environment = {"PATH": str(checkout / "bin")}
    command = [str(checkout / ".ci" / "cluster-packages")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_missing_packages_of_the_test_cluster_are_installed_as_root(checkout: Path) -> None:
    add_program(checkout, "id", "#!/bin/bash\necho 0\n")
    add_program(checkout, "ip", "#!/bin/bash\n")
    add_program(checkout, "apt-get", f'#!/bin/bash\necho "$*" >> {checkout}/asked\n')
    assert cluster_packages(checkout).returncode == 0
    assert (checkout / "asked").read_text().splitlines()[-1].endswith("pdsh openssh-server")


def test_packages_of_the_test_cluster_that_cannot_be_installed_are_not_an_error(checkout: Path) -> None:
    result = cluster_packages(checkout)
    assert result.returncode == 0
    assert "as root: apt-get install pdsh openssh-server iproute2" in result.stderr
