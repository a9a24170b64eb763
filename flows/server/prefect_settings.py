"""Prefect's settings that this program relies on. They go into the environment of all processes that import Prefect.

Without them, Prefect takes values from the user's environment, profile or files, which other programs may need. The
environment takes precedence over the others. If a setting has several names, the one that Prefect looks up first is
used here. Options of flows and tasks are not here (``tasks.run_options``), so that any worker's runs have them.

Left to the user: how much is logged and how it looks, which server is used and how it is reached, the metrics and log
of a server, how often its services and a worker look for work, and everything that flows do not use.
"""

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from pydantic import ValidationError

from t5train.errors import InputError
from t5train.files.os_errors import in_one_line
from t5train.spec.overrides import explain

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


@contextmanager
def reading_settings() -> Iterator[None]:
    """Let Prefect read its settings within the block, without files in the current folder.

    Raises InputError if a setting is not valid.
    """
    with chdir(NEUTRAL_FOLDER):
        try:
            yield
        except ValueError as error:
            why = explain(error) if isinstance(error, ValidationError) else in_one_line(error)
            raise InputError(
                f"a setting of Prefect is not valid: {why}. Correct it where you have set it: in the environment "
                "(PREFECT_...), or in the active profile (`prefect config view --show-sources`)"
            ) from error
