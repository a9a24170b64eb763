"""What this program relies on in Prefect's settings is the same whatever the user's environment and files say."""

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prefect.settings import get_current_settings
from prefect.settings.models.root import Settings
from pydantic import AliasChoices, BaseModel

from flows.cli import run_command
from flows.run_parameters import RunParameters
from flows.server.prefect_server import _embedded_environment, _start, server_environment
from flows.server.prefect_settings import _SECTIONS, CLIENT, SERVER, client_environment, put, reading_settings
from infra.head.launch.held_run import HeldRun
from t5train.errors import InputError
from t5train.progress import silent

RELIED_ON = ("flows.", "tasks.", "results.", "runner.", "worker.", "events.", "client.metrics.", "logging.")
LEFT = {
    # Set by `run` and by workers.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY",
    # Only for tasks that are submitted to runners or to background workers, or for results, of which there are none.
    "PREFECT_TASKS_RUNNER_THREAD_POOL_MAX_WORKERS", "PREFECT_TASKS_RUNNER_PROCESS_POOL_MAX_WORKERS",
    "PREFECT_TASKS_SCHEDULING_DEFAULT_STORAGE_BLOCK", "PREFECT_TASKS_SCHEDULING_DELETE_FAILED_SUBMISSIONS",
    "PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK", "PREFECT_RESULTS_LOCAL_STORAGE_PATH",
    # Only for runners and web servers that are not started.
    "PREFECT_RUNNER_PROCESS_LIMIT", "PREFECT_RUNNER_POLL_FREQUENCY", "PREFECT_RUNNER_SERVER_HOST",
    "PREFECT_RUNNER_SERVER_PORT", "PREFECT_RUNNER_SERVER_LOG_LEVEL", "PREFECT_RUNNER_SERVER_MISSED_POLLS_TOLERANCE",
    "PREFECT_WORKER_WEBSERVER_HOST", "PREFECT_WORKER_WEBSERVER_PORT", "PREFECT_CLIENT_METRICS_PORT",
    # How much is logged, how it looks, and how often a worker looks for work.
    "PREFECT_WORKER_DEBUG_MODE", "PREFECT_WORKER_QUERY_SECONDS", "PREFECT_WORKER_CANCELLATION_POLL_SECONDS",
    "PREFECT_LOGGING_LEVEL", "PREFECT_LOGGING_CONFIG_PATH", "PREFECT_LOGGING_EXTRA_LOGGERS",
    "PREFECT_LOGGING_COLORS", "PREFECT_LOGGING_TO_API_BATCH_INTERVAL",
}  # fmt: skip
READ = """
import json, sys
from pathlib import Path
from flows.cli import run_command
from flows.run_parameters import RunParameters
from flows.server.prefect_server import become_client, configured_api_url
if len(sys.argv) > 1:
    become_client(Path(sys.argv[1]), "http://127.0.0.1:1/api")
else:
    configured_api_url()
from prefect.settings import get_current_settings
found = get_current_settings()
print(json.dumps([found.tasks.default_retries, found.flows.default_retries, found.tasks.refresh_cache,
                  found.worker.heartbeat_seconds, found.logging.markup]))
"""
DEFAULTS = [0, 0, False, 30, False]
HOSTILE_TOML = """
flows.default_retries = 2
tasks = {default_retries = 3, refresh_cache = true}
worker.heartbeat_seconds = 9999
logging.markup = true
"""
HOSTILE = {
    "PREFECT_FLOW_DEFAULT_RETRIES": "2",
    "PREFECT_TASK_DEFAULT_RETRIES": "3",
    "PREFECT_TASKS_REFRESH_CACHE": "true",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "9999",
    "PREFECT_LOGGING_MARKUP": "true",
}
IN_ANOTHER_CASE = {"prefect_tasks_default_retries": "3", "Prefect_Logging_Markup": "true"}
WHOLE_SECTIONS = {
    "PREFECT_SERVER": '{"database": {"connection_url": "sqlite+aiosqlite:////tmp/other.db"}}',
    "PREFECT_SERVER_API": '{"auth_string": null}',
    "prefect_tasks": '{"default_retries": 3}',
}


def settings_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """The path of each setting, and the environment variable that Prefect looks up first."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, f"{path}{name}.")
            continue
        alias = field.validation_alias
        names = [each for each in alias.choices if isinstance(each, str)] if isinstance(alias, AliasChoices) else []
        prefix = dict(model.model_config)["env_prefix"]
        yield f"{path}{name}", (names[0] if names else f"{prefix}{name}").upper()


def sections_of(model: type[BaseModel]) -> Iterator[str]:
    """The variables that hold a whole section."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield f"{dict(model.model_config)['env_prefix']}{name}".upper()
            yield from sections_of(field.annotation)


def without_prefect(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: text for name, text in environment.items() if not name.startswith("PREFECT_")}


def value(settings: BaseModel, path: str) -> object:
    found: object = settings
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_everything_that_flows_and_workers_rely_on_is_decided() -> None:
    found = {variable for path, variable in settings_of(Settings) if path.startswith(RELIED_ON)}
    assert found - CLIENT.keys() == LEFT
    assert sorted(sections_of(Settings)) == sorted(_SECTIONS)
    assert not _SECTIONS & {variable for _, variable in settings_of(Settings)}


def test_pinned_settings_exist_and_have_prefects_default_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with reading_settings():
        defaults = Settings()
    for name, text in (CLIENT | SERVER | client_environment(tmp_path, "http://127.0.0.1:1/api", "key")).items():
        monkeypatch.setenv(name, text)
    with reading_settings():
        pinned = Settings()
    paths = {variable: path for path, variable in settings_of(Settings)}
    own = {
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": True,
        "PREFECT_TASKS_DEFAULT_PERSIST_RESULT": False,  # None stands for the other setting of results
        "PREFECT_SERVER_API_BASE_PATH": "/api",  # None stands for it
    }
    for name in CLIENT | SERVER:
        assert value(pinned, paths[name]) == own.get(name, value(defaults, paths[name])), name
    assert set(server_environment(tmp_path, 1, "key")) - {"DO_NOT_TRACK"} <= paths.keys()


@pytest.mark.slow
@pytest.mark.parametrize("is_embedded", [False, True])
def test_hostile_settings_in_environment_profile_and_files_change_nothing(tmp_path: Path, is_embedded: bool) -> None:
    home, current = tmp_path / "prefect", tmp_path / "current"
    current.mkdir()
    lines = "".join(f'{name} = "{text}"\n' for name, text in HOSTILE.items())
    (tmp_path / "profiles.toml").write_text(f'active = "mine"\n[profiles.mine]\n{lines}')
    (current / ".env").write_text(lines)
    (current / "prefect.toml").write_text(HOSTILE_TOML)
    (current / "pyproject.toml").write_text(f"[tool.prefect]{HOSTILE_TOML}")
    # Prefect would take the last of the variables that differ only in case.
    environment = without_prefect() | dict.fromkeys(map(str.upper, IN_ANOTHER_CASE), "0") | IN_ANOTHER_CASE
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_PROFILE": "mine"} | HOSTILE
    if is_embedded:
        home.mkdir(mode=0o700)
        (home / "api-key").touch(mode=0o600)
        (home / "api-key").write_text(f"t5-pretrain:{'k' * 43}")
    command = [sys.executable, "-P", "-c", READ, *([str(home)] if is_embedded else [])]
    made = subprocess.run(command, env=environment, cwd=current, capture_output=True, text=True, check=True)
    assert json.loads(made.stdout.splitlines()[-1]) == DEFAULTS


def test_a_run_reads_no_settings_in_the_current_folder_when_it_turns_heartbeats_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.toml").write_text("[client]\nmax_retries = 0\n")
    monkeypatch.chdir(tmp_path)
    found: list[Settings] = []
    monkeypatch.setattr("flows.pretrain.pretrain_flow", lambda *_: lambda **_: found.append(get_current_settings()))
    parameters = RunParameters(recipe="smoke", root=tmp_path)
    run_command._run_flow(cast(HeldRun, None), parameters, silent, False, fine_tuning=False)
    assert [(each.flows.heartbeat_frequency, each.client.max_retries) for each in found] == [(None, 5)]
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(("name", "text"), WHOLE_SECTIONS.items())
@pytest.mark.parametrize("is_in_profile", [False, True])
def test_a_variable_that_holds_a_whole_section_is_refused_before_prefect_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, is_in_profile: bool
) -> None:
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    if is_in_profile:
        (tmp_path / "profiles.toml").write_text(f"active = 'mine'\n[profiles.mine]\n{name} = '{text}'\n")
    else:
        monkeypatch.setenv(name, text)
    where = f" in {tmp_path}/profiles.toml" if is_in_profile else ""
    said = f"^{name}{where} holds a whole section of Prefect's settings, which would"
    with pytest.raises(InputError, match=said), reading_settings():
        pytest.fail("Prefect could read it")


def test_variables_that_differ_from_ours_only_in_case_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PREFECT_HOME": "/a", "prefect_home": "/b", "other": "kept"}
    put(environment, {"PREFECT_HOME": "/c"})
    assert environment == {"PREFECT_HOME": "/c", "other": "kept"}
    started: list[dict[str, str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda *_, env, **__: started.append(env))
    monkeypatch.setenv("prefect_server_api_auth_string", "known:to-others")
    _start(
        tmp_path / "log", cast(socket.socket, SimpleNamespace(fileno=lambda: 0)), server_environment(tmp_path, 1, "key")
    )
    assert "prefect_server_api_auth_string" not in started[0]
    assert started[0]["PREFECT_SERVER_API_AUTH_STRING"] == "key"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PREFECT_API_REQUEST_TIMEOUT", "soon"),
        ("PREFECT_LOGGING_LEVEL", "LOUD"),
        ("PREFECT_SERVER_DATABASE_TIMEOUT", "soon"),
        ("PREFECT_DEBUG_MODE", "perhaps"),
        ("PREFECT_CLIENT_CUSTOM_HEADERS", "{"),
    ],
)
def test_a_setting_that_is_not_valid_is_one_line_with_its_variable_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    said = rf"a setting of Prefect is not valid: {name} is ('{text}'|not JSON)[^;]*\. Correct it where you have set it"
    with pytest.raises(InputError, match=said) as refused, reading_settings():
        Settings()
    assert "\n" not in str(refused.value)
    assert "prefect config view" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("PREFECT_API_SSL_CERT_FILE", "{missing}", "missing cannot be used as certificates .* Correct PREFECT_API_SSL"),
        ("PREFECT_API_SSL_CERT_FILE", "{file}", "logging.yml cannot be used as certificates"),
        ("all_proxy", "socks5://127.0.0.1:1080", "cannot use a proxy .*SOCKS.* unset ALL_PROXY"),
        ("https_proxy", "quic://127.0.0.1:1080", "cannot use a proxy .*quic.* unset ALL_PROXY"),
        ("PREFECT_LOGGING_CONFIG_PATH", "{file}", "logging.yml is not a logging configuration .*PREFECT_LOGGING"),
    ],
)
def test_a_setting_that_names_a_file_or_proxy_that_cannot_be_used_is_one_line_with_a_remedy(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / "logging.yml").write_text("no table: [")
    value = text.format(missing=tmp_path / "missing", file=tmp_path / "logging.yml")
    environment = without_prefect() | {"PREFECT_HOME": str(tmp_path / "home"), name: value}
    command = [sys.executable, "-P", "-m", "flows.cli", "deploy"]
    made = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.search(f"^error: .*{said}", made.stderr), made.stderr
    assert made.returncode == InputError.exit_code
    assert len(made.stderr.splitlines()) == 1


@pytest.mark.parametrize("error", [tomllib.TOMLDecodeError("Invalid value"), AttributeError("no attribute 'get'")])
def test_the_error_about_profiles_that_prefect_cannot_read_names_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    with pytest.raises(InputError, match=rf"{tmp_path}/profiles\.toml .*Correct the file"), reading_settings():
        raise error


def test_the_database_of_another_server_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://team.example/prefect")
    made = _embedded_environment(tmp_path, 1, "key")
    assert made["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" not in server_environment(tmp_path, 1, "key")
