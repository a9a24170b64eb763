"""The profile that ``up`` writes: a plain ``prefect`` finds it, and it never overrides what the user has chosen."""

import stat
from pathlib import Path

import pytest
from prefect.settings import PREFECT_PROFILES_PATH, load_profiles, temporary_settings
from prefect.settings.profiles import _read_profiles_from

from flows.server.prefect_profile import NAME, UserProfiles
from t5train.errors import InputError

URL, KEY = "http://127.0.0.1:4200/api", "t5-pretrain:key"
OWN = """# mine
active = "work"  # for now

[profiles.work]
# of the office
PREFECT_API_URL = "https://prefect.example/api"
PREFECT_LOGGING_LEVEL = "DEBUG"
"""


def profiles(tmp_path: Path, **environment: str) -> UserProfiles:
    return UserProfiles.find({"PREFECT_HOME": str(tmp_path / "home"), **environment})


def written(tmp_path: Path, text: str) -> UserProfiles:
    found = profiles(tmp_path)
    found.path.parent.mkdir()
    found.path.write_text(text)
    return found


def settings(path: Path) -> dict[str, str]:
    return _read_profiles_from(path)[NAME].to_environment_variables()


def test_a_user_without_profiles_gets_one_that_is_active_and_private(tmp_path: Path) -> None:
    found = profiles(tmp_path)
    assert found.write(URL, KEY)
    assert settings(found.path) == {"PREFECT_API_URL": URL, "PREFECT_API_AUTH_STRING": KEY}
    assert _read_profiles_from(found.path).active_name == NAME
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
    assert found.is_ours(URL)
    assert not found.is_ours("http://127.0.0.1:4201/api")


@pytest.mark.parametrize(
    ("text", "is_chosen"),
    [
        ('active = "ephemeral"\n', False),
        ('[profiles.ephemeral]\nPREFECT_SERVER_EPHEMERAL_ENABLED = "true"\n\n[profiles.other]\n', False),
        (OWN, True),
        ('active = "local"\n', True),
        ('[profiles.ephemeral]\nPREFECT_LOGGING_LEVEL = "DEBUG"\n', True),
    ],
)
def test_a_profile_stays_active_only_if_the_user_has_chosen_or_changed_it(
    tmp_path: Path, text: str, is_chosen: bool
) -> None:
    found = written(tmp_path, text)
    before = _read_profiles_from(found.path).active_name
    assert found.write(URL, KEY) is not is_chosen
    assert _read_profiles_from(found.path).active_name == (before if is_chosen else NAME)
    assert settings(found.path)["PREFECT_API_AUTH_STRING"] == KEY
    assert found.is_ours(URL) is not is_chosen


@pytest.mark.parametrize("name", ["PREFECT_PROFILE", "PREFECT_API_URL"])
def test_a_profile_or_url_in_the_environment_counts_as_the_users_choice(tmp_path: Path, name: str) -> None:
    found = profiles(tmp_path, **{name: "chosen"})
    assert not found.write(URL, KEY)
    assert _read_profiles_from(found.path).active_name is None
    assert found.overrides == (name,)


def test_comments_and_other_profiles_are_kept(tmp_path: Path) -> None:
    found = written(tmp_path, OWN)
    found.path.chmod(0o644)
    found.write(URL, KEY)
    assert found.path.read_text().startswith(OWN)
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600


def test_the_next_start_updates_the_profile_and_keeps_the_users_additions(tmp_path: Path) -> None:
    found = profiles(tmp_path)
    found.write(URL, KEY)
    found.path.write_text(found.path.read_text() + 'PREFECT_LOGGING_LEVEL = "DEBUG"\n\n[profiles.later]\n')
    assert found.write("http://127.0.0.1:4300/api", "t5-pretrain:next")
    assert settings(found.path) == {
        "PREFECT_API_URL": "http://127.0.0.1:4300/api",
        "PREFECT_API_AUTH_STRING": "t5-pretrain:next",
        "PREFECT_LOGGING_LEVEL": "DEBUG",
    }
    assert "later" in _read_profiles_from(found.path).names
    assert KEY not in found.path.read_text().split('"')


@pytest.mark.parametrize("content", [b"profiles = [", b'profiles = {work = {PREFECT_API_URL = "x"}}\n', b"# \xff"])
def test_a_profiles_file_that_cannot_be_edited_is_left_unchanged(tmp_path: Path, content: bytes) -> None:
    found = written(tmp_path, "")
    found.path.write_bytes(content)
    with pytest.raises(InputError, match=r"profiles\.toml"):
        found.write(URL, KEY)
    assert found.path.read_bytes() == content
    assert len(list(found.path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("profiles = []\n", r"profiles is \[\], but must be a table \[profiles\]"),
        ('profiles = "x"\n', r"profiles is 'x', but must be a table"),
        (f'[profiles]\n{NAME} = "x"\n', rf"profiles\.{NAME} is 'x', but must be a table"),
        ("active = 3\n", "active is 3, but must be the name of a profile"),
    ],
)
def test_profiles_that_are_not_tables_are_refused_by_the_name_of_the_file(
    tmp_path: Path, content: str, said: str
) -> None:
    found = written(tmp_path, content)
    refusal = pytest.raises(InputError, match=rf"{found.path}: {said}.*Correct the file")
    with refusal:
        found.write(URL, KEY)
    with refusal:
        found.is_ours(URL)
    assert profiles(tmp_path).active is None
    assert found.path.read_text() == content


def test_a_home_that_begins_with_a_tilde_is_in_the_users_home_as_for_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert UserProfiles.find({"PREFECT_HOME": "~/mine"}).path == Path("/home/me/mine/profiles.toml")
    assert UserProfiles.find({"PREFECT_PROFILES_PATH": "~/mine.toml"}).path == Path("~/mine.toml")


def test_a_symlink_to_the_profiles_file_is_kept(tmp_path: Path) -> None:
    found = written(tmp_path, "")
    target = tmp_path / "dotfiles.toml"
    found.path.rename(target)
    found.path.symlink_to(target)
    found.write(URL, KEY)
    assert found.path.is_symlink()
    assert KEY in target.read_text()


def has_ended(_api_url: str) -> bool:
    return False


def active_in_prefect(found: UserProfiles, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(found.path))
    with temporary_settings({PREFECT_PROFILES_PATH: found.path}):
        return load_profiles().active_name


@pytest.mark.parametrize("text", ["", 'active = "ephemeral"\n', "# mine\n\n[profiles.other]\n", f'active = "{NAME}"\n'])
def test_the_default_profile_is_active_again_when_the_server_has_ended(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, text)
    found = profiles(tmp_path)
    found.write(URL, KEY)
    assert active_in_prefect(found, monkeypatch) == NAME
    assert found.release(URL, KEY, has_ended)
    assert active_in_prefect(found, monkeypatch) == "ephemeral"
    assert not profiles(tmp_path).is_ours(URL)
    assert text.replace(f'active = "{NAME}"\n', "") in found.path.read_text()
    assert not found.release(URL, KEY, has_ended)


def test_the_profile_from_before_is_active_again_also_if_the_user_has_chosen_the_servers(tmp_path: Path) -> None:
    written(tmp_path, OWN)
    found = profiles(tmp_path)
    found.write(URL, KEY)
    found.path.write_text(found.path.read_text().replace('active = "work"', f'active = "{NAME}"'))
    assert found.release(URL, KEY, has_ended)
    assert _read_profiles_from(found.path).active_name == "work"
    assert settings(found.path)["PREFECT_API_URL"] == URL


def test_the_profile_leads_again_to_an_earlier_server_that_is_still_running(tmp_path: Path) -> None:
    other = "http://127.0.0.1:4300/api"
    assert profiles(tmp_path).write(other, "t5-pretrain:other")
    second = profiles(tmp_path)
    assert second.write(URL, KEY)
    assert second.release(URL, KEY, lambda url: url == other)
    assert profiles(tmp_path).is_ours(other)
    assert settings(second.path)["PREFECT_API_AUTH_STRING"] == "t5-pretrain:other"
    restarted = profiles(tmp_path)  # at the same port, with a new key
    restarted.write(other, KEY)
    assert restarted.release(other, KEY, lambda _: True)
    assert not profiles(tmp_path).is_ours(other)


def test_another_profile_or_server_that_became_active_meanwhile_stays_active(tmp_path: Path) -> None:
    found = profiles(tmp_path)
    found.write(URL, KEY)
    ours = found.path.read_text()
    for meanwhile in (ours.replace(f'active = "{NAME}"', 'active = "work"'), ours.replace(KEY, f"{KEY}-of-the-next")):
        found.path.write_text(meanwhile)
        assert not found.release(URL, KEY, has_ended)
        assert found.path.read_text() == meanwhile


def test_a_profiles_file_that_cannot_be_restored_is_left_unchanged_and_the_error_has_a_remedy(tmp_path: Path) -> None:
    found = profiles(tmp_path)
    found.write(URL, KEY)
    odd = f'"active" = "{NAME}"\n' + found.path.read_text().partition("\n")[2]
    found.path.write_text(odd)
    with pytest.raises(InputError, match="Use another profile: `prefect profile use ephemeral`"):
        found.release(URL, KEY, has_ended)
    assert found.path.read_text() == odd
