"""A server that other machines can reach has a key."""

from pathlib import Path

import pytest

from t5train.errors import SpecError, StorageError
from t5train.inference.serve.access import KEY_VARIABLE, Access

KEY = "0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "serve.key"
    file.touch(mode=0o600)
    file.write_text(f"{KEY}\n")
    return file


def test_without_a_key_only_this_machine_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert Access.of(None, is_loopback=True).allows_key("")
    with pytest.raises(SpecError, match=r"^other machines can connect to this address, so a key is needed: make one"):
        Access.of(None, is_loopback=False)


def test_the_key_is_that_of_a_private_file_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, key_file: Path
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY[::-1])
    assert Access.of(None, is_loopback=False).key == KEY[::-1]
    assert Access.of(key_file, is_loopback=False).key == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(StorageError, match="so others may know the key"):
        Access.of(key_file, is_loopback=True)


@pytest.mark.parametrize("key", ["", "short", "with spaces in the middle", "ключключключключ"])
def test_a_key_that_no_client_can_send_or_anybody_guesses_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(SpecError, match=f"has {len(key)} characters: it must be at least 16") as refused:
        Access.of(None, is_loopback=True)
    assert not key or key not in str(refused.value)
