"""What `up` prints for the user's next command, and what it leaves when it ends."""

import sys
from pathlib import Path

import pytest

from flows.cli.operate.server_commands import _prefect, _releasing_profile
from flows.server import api_key
from flows.server.prefect_profile import UserProfiles
from t5train.files.locks import private_folder

URL = "http://127.0.0.1:4200/api"


def test_the_printed_command_exists_wherever_prefect_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    monkeypatch.setattr(sys, "executable", str(python))
    assert _prefect() == f"{python} -m prefect"
    beside = python.with_name("prefect")
    beside.touch(mode=0o755)
    assert _prefect() == str(beside)


def test_up_restores_the_users_profile_however_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles = UserProfiles.find({"PREFECT_HOME": str(tmp_path / "user")})
    home = private_folder(tmp_path / "prefect")
    key = api_key.renew(home)
    assert profiles.write(URL, key)
    with pytest.raises(KeyboardInterrupt), _releasing_profile(profiles, URL, home):
        raise KeyboardInterrupt
    assert not profiles.is_ours(URL)
    assert "profile t5-pretrain no longer leads to this server, which ends" in capsys.readouterr().err
    with _releasing_profile(profiles, URL, home):
        profiles.path.write_text("not TOML")
    assert "profile t5-pretrain may still be active" in capsys.readouterr().err
