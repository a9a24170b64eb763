"""An environment that a host says is complete is there, whatever fails while it is made."""

import ctypes
import fcntl
import io
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from infra.node import environment_installer, node_folders
from infra.node.channel import Channel
from infra.node.environment_installer import MARKER, Install, _locked, install
from t5train.errors import HostMisconfigured
from t5train.files.atomic import write_json

Installer = Callable[[], bool]


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "env"


@pytest.fixture
def run(into: Path, own_node_folder: None, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Install no wheels, with a Python that is an empty file; returns whether the environment is new."""

    def make_python(argv: list[str], _: str) -> None:
        if "venv" in argv:
            (into / "bin").mkdir()
            (into / "bin/python").touch()

    monkeypatch.setattr(environment_installer, "_run", make_python)
    monkeypatch.setattr(environment_installer, "_end_with_head", lambda: None)

    def run() -> bool:
        replies = io.BytesIO()
        install(Install(into, "a" * 64, (), unpacked_bytes=0), Channel(io.BytesIO(), replies))
        return b'"is_new": true' in replies.getvalue().replace(b'":true', b'": true')

    return run


def fail(*_: object, **__: object) -> NoReturn:
    raise OSError(5, "Input/output error")


def test_an_environment_is_complete_though_the_wheels_of_another_cannot_be_removed(
    run: Installer, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node_folders.node_folder() / "wheels/old").mkdir(mode=0o700, parents=True)
    (node_folders.node_folder() / "wheels").chmod(0o700)
    monkeypatch.setattr(shutil, "rmtree", fail)
    assert run()
    assert (into / "bin/python").exists()
    assert not run()


def test_an_environment_whose_marker_may_not_be_on_disk_is_made_again(
    run: Installer, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*values: Any) -> None:
        write_json(*values)
        fail()

    with monkeypatch.context() as patched:
        patched.setattr(environment_installer, "write_json", write)
        with pytest.raises(OSError, match="Input/output error"):
            run()
    assert [path.name for path in into.iterdir()] == [MARKER]
    assert run()
    assert (into / "bin/python").exists()


def test_the_first_error_is_reported_though_the_folder_cannot_be_emptied(
    run: Installer, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_half(*_: object) -> NoReturn:
        (into / "lib").mkdir()
        monkeypatch.setattr(shutil, "rmtree", fail)
        raise HostMisconfigured("the wheels cannot be installed")

    monkeypatch.setattr(environment_installer, "_run", make_half)
    with pytest.raises(HostMisconfigured, match="the wheels cannot be installed"):
        run()


def test_what_was_not_written_to_the_disk_is_an_error(run: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        syncfs = staticmethod(lambda _: -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Disk)
    monkeypatch.setattr(ctypes, "get_errno", lambda: 5)
    with pytest.raises(OSError, match="Input/output error"):
        run()


def test_who_waited_for_a_file_that_was_replaced_waits_for_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    path.touch()

    def wait() -> int:
        with _locked(path, "another host to make it", Channel(io.BytesIO(), io.BytesIO())):
            return path.stat().st_ino

    with ThreadPoolExecutor(1) as pool, open(path, "r+b") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        waiting = pool.submit(wait)
        await_waiter(path)
        path.rename(tmp_path / "removed")
        path.touch()
        with open(path, "r+b") as second:
            fcntl.flock(second, fcntl.LOCK_EX)
            fcntl.flock(first, fcntl.LOCK_UN)
            await_waiter(path)
            assert not waiting.done()
        assert waiting.result(20) == path.stat().st_ino


def await_waiter(path: Path) -> None:
    """Wait until somebody waits for the lock of a file."""
    deadline, inode = time.monotonic() + 20, f":{path.stat().st_ino} "
    while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
        assert time.monotonic() < deadline, "nobody waits for it"
        time.sleep(0.01)
