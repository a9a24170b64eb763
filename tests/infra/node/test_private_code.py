"""Code that was sent to a host runs only from folders that no other user can write to."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.head.hosts import ssh
from infra.head.hosts.code_shipping import hosts_with_code
from infra.head.hosts.nodes import node_command
from infra.node import node_folders
from infra.node.code_bundle import own_bundle
from infra.node.node_folders import code_folder, node_path
from tests.support.simulated_nodes import ThisMachine

NOBODY = 65534
DIGEST = own_bundle().digest
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of the node folder. Anyone can write to it, as to /var/tmp."""
    parent = tmp_path / "tmp"
    parent.mkdir()
    parent.chmod(0o1777)
    monkeypatch.setattr(node_folders, "PARENT", parent)
    return parent


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Plant a program where the head's code is expected; return the path of the file that it creates if it runs."""
    program = code_folder(DIGEST) / "infra" / "node"
    program.mkdir(parents=True)
    (program.parent / "__init__.py").touch()
    (program / "__init__.py").touch()
    (program / "__main__.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n")
    (code_folder(DIGEST) / "sitecustomize.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n")
    for folder in (node_path(), node_path("code"), code_folder(DIGEST)):
        folder.chmod(0o700)
    return tmp_path / "was-run"


def run() -> subprocess.CompletedProcess[str]:
    command = node_command("facts", DIGEST)
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", stdin=subprocess.DEVNULL)


def test_code_in_the_users_private_folders_is_run(planted: Path) -> None:
    assert run().returncode == 0
    assert planted.exists()


def give_away(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def give_away_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("names", [(), ("code",), ("code", DIGEST)])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(give_away, marks=as_root),
        give_away_link,
        lambda folder: folder.chmod(0o770),
        lambda folder: folder.chmod(0o707),
    ],
)
def test_code_in_a_folder_that_others_could_have_written_is_not_run(
    planted: Path, names: tuple[str, ...], change: Callable[[Path], None]
) -> None:
    change(node_path(*names))
    result = run()
    assert not planted.exists()
    assert result.returncode == 1
    assert f"{node_path(*names)} is not a folder that only user {os.getuid()} can access" in result.stderr
    assert "Move that folder away" in result.stderr


def test_a_parent_in_which_others_can_rename_is_refused(planted: Path, parent: Path) -> None:
    parent.chmod(0o777)
    assert f"other users can replace the contents of {parent}" in run().stderr
    assert not planted.exists()


def test_the_path_of_missing_code_is_named() -> None:
    assert f"{node_path()} cannot be examined (No such file or directory)" in run().stderr


def test_the_error_of_a_failed_node_command_does_not_show_its_program_text() -> None:
    shown = str(ssh.failure_of("a", node_command("facts", DIGEST), 1, b"said"))
    assert "-m infra.node" in shown or "..." in shown
    assert "\\n" not in shown


@as_root
def test_a_host_whose_node_folder_belongs_to_another_user_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    node_path().mkdir(mode=0o700)
    give_away(node_path())
    assert hosts_with_code(ThisMachine(), ["a"], "it is not asked") == []
    assert "it is not asked: a: " in caplog.text
    assert "is not a folder that only user 0 can access" in caplog.text
