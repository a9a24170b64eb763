"""The profile ``t5-pretrain`` in the user's Prefect settings, with which plain ``prefect`` finds server and key."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5train.errors import InputError, StorageError
from t5train.files import atomic
from t5train.files.os_errors import reason

NAME = "t5-pretrain"
CHOOSING = ("PREFECT_PROFILE", "PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
"""Environment variables that take precedence over the active profile."""

DEFAULT = "ephemeral"
"""The name of the profile that Prefect uses if the file names no other."""

_DEFAULT_SETTINGS = {"PREFECT_SERVER_EPHEMERAL_ENABLED": "true"}
_TABLE = re.compile(r"\s*\[")
_OUR_TABLE = re.compile(rf'\s*\[\s*profiles\s*\.\s*"?{NAME}"?\s*\]\s*(#.*)?')
_OUR_LINE = re.compile(r'\s*"?(PREFECT_API_URL|PREFECT_API_AUTH_STRING)"?\s*=')
_ACTIVE = re.compile(r"\s*active\s*=")


@dataclass(frozen=True)
class UserProfiles:
    """The user's profiles file, and the variables that override it. Find them before a server changes them."""

    path: Path
    overrides: tuple[str, ...]
    active: str | None
    """The active profile; None if the file names none, or cannot be read."""
    ours: Mapping[str, Any]
    """The settings of profile ``t5-pretrain``, which an earlier ``up`` wrote; empty if there are none."""

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "UserProfiles":
        """Look where Prefect looks, except in the current folder."""
        home = environment.get("PREFECT_HOME") or Path.home() / ".prefect"
        path = Path(environment.get("PREFECT_PROFILES_PATH") or Path(home).expanduser() / "profiles.toml")
        overrides = tuple(name for name in CHOOSING if environment.get(name))
        found = cls(path, overrides, None, {})
        with suppress(InputError, StorageError):  # `write` raises them
            content = _parse(path, found._text())
            found = cls(path, overrides, content.get("active"), _settings(content))
        return found

    def active_settings(self) -> dict[str, Any]:
        """Return the settings of the profile that Prefect uses; empty if the file does not have it.

        Raises InputError or StorageError if the file cannot be read.
        """
        found = _parse(self.path, self._text())
        return _settings(found, os.environ.get("PREFECT_PROFILE") or found.get("active", DEFAULT))

    def is_ours(self, api_url: str) -> bool:
        """Return whether ``api_url`` is configured only because ``up`` activated its profile."""
        if self.overrides:
            return False
        found = _parse(self.path, self._text())
        return found.get("active") == NAME and _settings(found).get("PREFECT_API_URL") == api_url

    def write(self, api_url: str, key: str) -> bool:
        """Add or update the profile, and activate it unless the user has chosen another. Returns whether it is in use.

        Other profiles, settings and comments are kept. If the file cannot be edited that way, it is left unchanged, and
        InputError or StorageError is raised.
        """
        text = self._text()
        found = _parse(self.path, text)
        is_free = not self.overrides and _has_no_choice(found)
        settings = {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": key}
        wanted = found | {"profiles": found.get("profiles", {}) | {NAME: _settings(found) | settings}}
        wanted |= {"active": NAME} if is_free else {}
        edited = "\n".join(_with_settings(text.splitlines(), settings)) + "\n"
        edited = _with_active(edited, NAME) if is_free else edited
        self._replace(edited, wanted, f"Add profile {NAME} to that file yourself")
        return not self.overrides and bool(wanted.get("active") == NAME)

    def release(self, api_url: str, key: str, is_running: Callable[[str], bool]) -> bool:
        """Activate the profile that was active before, if the active one still leads to this server, which ends.

        That is Prefect's default profile if there was none, or only that of an earlier ``up``; if the server of that
        ``up`` is still running, the profile leads to it again. Returns whether anything was done. Raises the errors of
        ``write``.
        """
        text = self._text()
        found = _parse(self.path, text)
        settings = {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": key}
        if found.get("active") != NAME or not settings.items() <= _settings(found).items():
            return False
        earlier = str(self.ours.get("PREFECT_API_URL"))
        if self.active == NAME and earlier != api_url and is_running(earlier):
            self.write(earlier, self.ours.get("PREFECT_API_AUTH_STRING", ""))
            return True
        name = None if self.active == NAME else self.active
        wanted = {each: value for each, value in found.items() if each != "active"} | ({"active": name} if name else {})
        self._replace(_with_active(text, name), wanted, f"Use another profile: `prefect profile use {name or DEFAULT}`")
        return True

    def _text(self) -> str:
        try:
            return self.path.read_text("utf-8")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror}. Fix its permissions") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path} is not UTF-8 text. Correct the file") from error

    def _replace(self, text: str, wanted: dict[str, Any], remedy: str) -> None:
        """Write the file. Raises InputError with the remedy unless the edited text means what is wanted."""
        if _parse(self.path, text) != wanted:
            raise InputError(f"{self.path} cannot be edited automatically. {remedy}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic.replacing(self.path.resolve(), mode=0o600) as file:  # keeps a symbolic link
                file.write(text.encode("utf-8"))
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {reason(error, self.path)}") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    """Return the contents of a profiles file, in which the active profile is a name, and each profile a table."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML ({error}). Correct the file") from error
    if not isinstance(found.get("active", ""), str):
        raise InputError(f"{path}: active is {found['active']!r}, but must be the name of a profile. Correct the file")
    profiles = found.get("profiles", {})
    tables = {"profiles": profiles} | (
        {f"profiles.{name}": each for name, each in profiles.items()} if isinstance(profiles, dict) else {}
    )
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise InputError(f"{path}: {name} is {value!r}, but must be a table [{name}]. Correct the file")
    return found


def _settings(found: dict[str, Any], name: str = NAME) -> dict[str, Any]:
    settings: dict[str, Any] = found.get("profiles", {}).get(name, {})
    return settings


def _has_no_choice(found: dict[str, Any]) -> bool:
    """Return whether no profile is active, or only Prefect's unchanged default."""
    profiles: dict[str, object] = found.get("profiles", {})
    is_default = found.get("active", DEFAULT) == DEFAULT
    return is_default and profiles.get(DEFAULT, _DEFAULT_SETTINGS) == _DEFAULT_SETTINGS


def _with_settings(lines: list[str], settings: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a file with these settings in the profile's table, which is appended if it is missing."""
    ours = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    is_inside = is_written = False
    for line in lines:
        if _TABLE.match(line):
            is_inside = _OUR_TABLE.fullmatch(line) is not None
        if is_inside and _OUR_LINE.match(line):
            continue
        yield line
        if is_inside and not is_written:
            is_written = True
            yield from ours
    if not is_written:
        yield from ([""] if lines and lines[-1].strip() else [])
        yield from (f"[profiles.{NAME}]", *ours)


def _with_active(text: str, name: str | None) -> str:
    """Return the text of a file in which this profile is active; with None, it names no active one."""
    lines = text.splitlines()
    first_table = next(index for index, line in enumerate(lines) if _TABLE.match(line))
    head = [line for line in lines[:first_table] if not _ACTIVE.match(line)]
    active = [] if name is None else [f"active = {json.dumps(name)}"]
    return "\n".join([*active, *head, *lines[first_table:]]) + "\n"
