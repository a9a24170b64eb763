"""Prefect's settings that this program relies on. They go into the environment of all processes that import Prefect.

Without them, Prefect takes values from the user's environment, profile or files, which other programs may need. The
environment takes precedence over the others. If a setting has several names, the one that Prefect looks up first is
used here. Options of flows and tasks are not here (``tasks.stages``), so that any worker's runs have them.

Left to the user: how much is logged and how it looks, which server is used and how it is reached, the metrics and log
of a server, how often its services and a worker look for work, and everything that flows do not use.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import chdir, contextmanager
from pathlib import Path

from pydantic import BaseModel, ValidationError

from flows.server.prefect_profile import UserProfiles
from t5train.errors import InputError
from t5train.files.os_errors import in_one_line
from t5train.spec.settings import explain

NEUTRAL_FOLDER = "/"
"""The working folder of processes that read Prefect's settings.

Prefect also reads .env, prefect.toml and pyproject.toml in the current folder. Anyone who can write there could set a
logging configuration, which can run code, or another server, which would get the user's key.
"""

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
}
"""Settings that turn off telemetry and promotion in Prefect's client and server."""

CLIENT = {
    # Retries: a permanent error would be repeated. Results: they would be written to a store that may not exist.
    "PREFECT_FLOWS_DEFAULT_RETRIES": "0",
    "PREFECT_FLOWS_DEFAULT_RETRY_DELAY_SECONDS": "0",
    "PREFECT_TASKS_DEFAULT_RETRIES": "0",
    "PREFECT_TASKS_DEFAULT_RETRY_DELAY_SECONDS": "0",
    "PREFECT_TASKS_DEFAULT_PERSIST_RESULT": "false",
    "PREFECT_TASKS_REFRESH_CACHE": "false",
    "PREFECT_TASKS_DISABLE_CACHING": "false",
    "PREFECT_TASKS_DEFAULT_NO_CACHE": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "pickle",
    # The log of a run is on its page. Markup would hide text in brackets, such as that of paths, or fail because of it.
    "PREFECT_LOGGING_TO_API_ENABLED": "true",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "warn",
    "PREFECT_LOGGING_TO_API_BATCH_SIZE": "4000000",
    "PREFECT_LOGGING_TO_API_MAX_LOG_SIZE": "1000000",
    "PREFECT_LOGGING_LOG_PRINTS": "false",
    "PREFECT_LOGGING_MARKUP": "false",
    # Heartbeats are events. Processes of one machine cannot all have a metrics server on the same port.
    "PREFECT_EVENTS_WORKER_MAX_QUEUE_SIZE": "0",
    "PREFECT_CLIENT_METRICS_ENABLED": "false",
    # A worker that looks offline loses its runs to others, and one that takes runs early waits with them.
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "30",
    "PREFECT_WORKER_PREFETCH_SECONDS": "10",
    "PREFECT_WORKER_ENABLE_CANCELLATION": "false",
    # A server that does not answer must not end runs, and a run installs nothing.
    "PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE": "false",
    "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",
    "PREFECT_RUNNER_SERVER_ENABLE": "false",
}
"""Settings of flows, workers and commands, whatever their server. All have Prefect's default values."""

_CONNECTION = {
    "PREFECT_CLOUD_API_URL": "https://api.prefect.cloud/api",  # clients treat the servers of this URL in another way
    "PREFECT_API_ENABLE_HTTP2": "false",
    "PREFECT_API_REQUEST_TIMEOUT": "60",
    "PREFECT_CLIENT_CUSTOM_HEADERS": "{}",
    "PREFECT_CLIENT_MAX_RETRIES": "5",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "",
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "true",
}
"""How clients reach a server that this program runs. For any other server, that is for its users to decide."""

_MEMORY = "prefect.server.utilities.messaging.memory"

SERVER = {
    # Clients look for the API at this path. Larger events than a limit are dropped: runs would look lost.
    "PREFECT_SERVER_API_BASE_PATH": "/api",
    "PREFECT_SERVER_EVENTS_MAXIMUM_SIZE_BYTES": "1500000",
    "PREFECT_SERVER_EVENTS_MAXIMUM_LABELS_PER_RESOURCE": "500",
    "PREFECT_SERVER_EVENTS_MAXIMUM_RELATED_RESOURCES": "100",
    "PREFECT_SERVER_API_DEFAULT_LIMIT": "200",
    "PREFECT_SERVER_API_MAX_PARAMETER_SIZE": "524288",
    "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    "PREFECT_SERVER_API_CSRF_TOKEN_EXPIRATION": "PT1H",
    "PREFECT_SERVER_UI_ENABLED": "true",
    "PREFECT_SERVER_UI_SERVE_BASE": "/",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "true",
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "true",
    # One process has everything in its memory.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.memory",
    "PREFECT_SERVER_DOCKET_URL": "memory://",
    "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": _MEMORY,
    "PREFECT_SERVER_EVENTS_MESSAGING_CACHE": _MEMORY,
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect.server.events.ordering.memory",
    "PREFECT_SERVER_WORKER_CHANNEL_CLEANUP_QUEUE_STORAGE": ("prefect.server.worker_communication.cleanup_queue.memory"),
    # Schedules, automations, heartbeats, the states of tasks, and which workers are online.
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_FOREMAN_INACTIVITY_HEARTBEAT_MULTIPLE": "3",
    "PREFECT_SERVER_SERVICES_FOREMAN_FALLBACK_HEARTBEAT_INTERVAL_SECONDS": "30",
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT5S",
}
"""Settings of a server that this program runs, whatever its address and home."""


def client_environment(home: Path, api_url: str, key: str) -> dict[str, str]:
    """Return the settings of a client of a server with its state in ``home``. Profiles of the user do not apply."""
    return (
        QUIET
        | CLIENT
        | _CONNECTION
        | {
            "PREFECT_HOME": str(home),
            "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
            "PREFECT_API_URL": api_url,
            "PREFECT_API_AUTH_STRING": key,
        }
    )


_SECTIONS = frozenset(
    f"PREFECT_{name}".rstrip("_").upper()
    for group, names in {
        "": "api cli client cloud deployments events experiments flows internal logging plugins results runner server "
        "tasks telemetry testing worker",
        "client_": "metrics",
        "logging_": "to_api",
        "runner_": "server",
        "server_": "api concurrency database deployments docket ephemeral events flow_run_graph logs services tasks ui "
        "worker_channel",
        "server_database_": "sqlalchemy sqlalchemy_connect_args sqlalchemy_connect_args_tls",
        "server_services_": "cancellation_cleanup db_vacuum event_persister event_logger foreman late_runs scheduler "
        "pause_expirations repossessor cleanup_reconciler task_run_recorder triggers",
        "server_tasks_": "scheduling",
        "tasks_": "runner scheduling",
        "worker_": "webserver",
    }.items()
    for name in (f"{group}{each}" for each in names.split())
)
"""Variables that hold a whole section of Prefect's settings as JSON: they override variables of single settings."""


def put(environment: MutableMapping[str, str], settings: Mapping[str, str]) -> None:
    """Set variables, and remove those with the same names in another case, which Prefect could use instead."""
    for name in [name for name in environment if name not in settings and name.upper() in settings]:
        del environment[name]
    environment.update(settings)


def _require_no_sections(names: Iterable[str], where: str) -> None:
    for name in names:
        if name.upper() in _SECTIONS:
            raise InputError(
                f"{name}{where} holds a whole section of Prefect's settings, which would override those that runs "
                "need. Set its settings one by one"
            )


@contextmanager
def reading_settings() -> Iterator[None]:
    """Let Prefect read its settings within the block, without files in the current folder.

    Raises InputError if a setting is not valid, or a variable or the active profile sets a whole section.
    """
    profiles = UserProfiles.find()
    _require_no_sections(os.environ, "")
    _require_no_sections(profiles.active_settings(), f" in {profiles.path}")
    with chdir(NEUTRAL_FOLDER):
        try:
            yield
        except (tomllib.TOMLDecodeError, AttributeError) as error:
            raise InputError(
                f"{profiles.path} does not hold Prefect profiles ({in_one_line(error)}). Correct the file"
            ) from error
        except ValueError as error:
            why = _explained(error)
            raise InputError(
                f"a setting of Prefect is not valid: {why}. Correct it where you have set it: in the environment, or "
                f"in the active profile in {profiles.path}"
            ) from error


def require_usable_settings() -> None:
    """Raise InputError if Prefect could read its settings, but a file or proxy that they name cannot be used."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.logging.configuration import load_logging_config
    from prefect.settings import get_current_settings

    found = get_current_settings()
    if (path := found.logging.config_path).exists():
        try:
            load_logging_config(path)
        except Exception as error:  # it can be a folder, not readable, not YAML or not a table, each with its own error
            raise InputError(
                f"{path} is not a logging configuration of Prefect ({in_one_line(error)}). Correct it, or unset "
                "PREFECT_LOGGING_CONFIG_PATH"
            ) from error
    try:
        SyncPrefectClient("http://127.0.0.1/api")
    except OSError as error:
        raise InputError(
            f"{found.api.ssl_cert_file} cannot be used as certificates of Prefect's client ({in_one_line(error)}). "
            "Correct PREFECT_API_SSL_CERT_FILE or SSL_CERT_FILE, whichever names it"
        ) from error
    except (ImportError, ValueError) as error:
        raise InputError(
            f"Prefect's client cannot use a proxy that the environment names ({in_one_line(error)}). Correct or unset "
            "ALL_PROXY, HTTP_PROXY and HTTPS_PROXY"
        ) from error


def _explained(error: ValueError) -> str:
    """Return what is wrong with Prefect's settings, each of which is named by its variable."""
    if not isinstance(error, ValidationError):
        return _not_json(error) or in_one_line(error)
    # Errors of this type follow from others.
    locations = (each["loc"] for each in error.errors() if each["type"] != "default_factory_not_called")
    return "; ".join(_problem(error, ".".join(map(str, loc))) for loc in dict.fromkeys(locations))


def _problem(error: ValidationError, setting: str) -> str:
    name = setting.upper()
    if not name.startswith("PREFECT_"):  # an alias is the name of a variable
        prefixes = (_prefix(each) for each in _classes(BaseModel) if each.__name__ == error.title)
        name = f"{next(prefixes, '')}{name}"
    what = explain(error, only=setting)
    return (
        what if not setting else what.replace(setting, name, 1) if what.startswith(f"{setting} ") else f"{name}: {what}"
    )


def _not_json(error: ValueError) -> str:
    """Return which variables hold a value that is not JSON, of which pydantic names only the field; empty if none."""
    field = next(iter(re.findall(r'error parsing value for field "(\w+)"', str(error))), "")
    variables = {f"{_prefix(each)}{field}".upper() for each in _classes(BaseModel) if field in each.model_fields}
    given = sorted(variables & {*map(str.upper, os.environ), *UserProfiles.find().active_settings()})
    return f"{' or '.join(given)} is not JSON" if given else ""


def _prefix(settings: type[BaseModel]) -> str:
    return str(dict(settings.model_config).get("env_prefix", ""))


def _classes(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield Prefect's settings classes. Their modules cannot be imported when Prefect cannot read its settings."""
    for each in model.__subclasses__():
        if each.__module__.startswith("prefect.settings."):
            yield each
        yield from _classes(each)
