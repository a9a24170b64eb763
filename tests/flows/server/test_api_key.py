"""The API key's file is used only if nobody but its owner can have read it."""

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.server import api_key
from t5train.errors import StorageError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a server, as the server makes it."""
    home = tmp_path / "prefect"
    home.mkdir(mode=0o700)
    return home


def test_each_start_makes_a_new_key_that_only_its_owner_can_read(home: Path) -> None:
    before = os.umask(0)
    try:
        first, second = api_key.renew(home), api_key.renew(home)
    finally:
        os.umask(before)
    assert re.fullmatch(r"t5-pretrain:[\w-]{43}", first)
    assert first != second == api_key.read(home)
    assert stat.S_IMODE(api_key.path_of(home).stat().st_mode) == 0o600
    assert list(home.iterdir()) == [api_key.path_of(home)]


def test_a_team_server_keeps_its_key(home: Path) -> None:
    first = api_key.keep(home)
    assert api_key.keep(home) == first == api_key.read(home)


@pytest.mark.parametrize("use", [api_key.read, api_key.keep])
def test_a_key_that_others_may_have_read_is_refused(home: Path, use: Callable[[Path], str]) -> None:
    api_key.renew(home)
    api_key.path_of(home).chmod(0o640)
    with pytest.raises(StorageError, match=r"mode -rw-r-----\), so others may know the key: restart the server"):
        use(home)


@pytest.mark.parametrize("use", [api_key.read, api_key.renew])
def test_a_key_in_a_folder_open_to_others_is_refused(home: Path, use: Callable[[Path], str]) -> None:
    api_key.renew(home)
    home.chmod(0o755)
    with pytest.raises(StorageError, match="is not a folder that only user"):
        use(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_of_another_user_is_refused(home: Path) -> None:
    api_key.renew(home)
    os.chown(api_key.path_of(home), 65534, 65534)
    with pytest.raises(StorageError, match="its owner is 65534"):
        api_key.read(home)


def test_a_symlink_instead_of_the_key_is_neither_read_nor_written_through(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("t5-pretrain:" + 43 * "a")
    elsewhere.chmod(0o600)
    api_key.path_of(home).symlink_to(elsewhere)
    with pytest.raises(StorageError, match="cannot be read"):
        api_key.read(home)
    key = api_key.renew(home)
    assert api_key.read(home) == key
    assert key not in elsewhere.read_text()


@pytest.mark.parametrize("text", ["", "t5-pretrain:", "another words"])
def test_a_file_without_a_valid_key_is_refused(home: Path, text: str) -> None:
    api_key.renew(home)
    api_key.path_of(home).write_text(text)
    with pytest.raises(StorageError, match="holds no API key: restart the server"):
        api_key.read(home)
