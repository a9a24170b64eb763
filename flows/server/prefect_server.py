"""Chooses the Prefect server for a command: the configured one, or an embedded one."""

import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, TextIO

from flows.process_start import HANG_SECONDS, await_start
from flows.server import api_key
from flows.server.prefect_profile import DEFAULT, NAME, UserProfiles
from flows.server.prefect_settings import (
    CLIENT,
    NEUTRAL_FOLDER,
    QUIET,
    SERVER,
    client_environment,
    put,
    reading_settings,
    require_usable_settings,
)
from infra.node.ports import free_port
from t5train.errors import InputError, LaunchError, RunLocked, SpecError, StorageError
from t5train.files.locks import is_locked, private_folder, try_lock
from t5train.files.os_errors import in_one_line
from t5train.progress import Progress

HOST = "127.0.0.1"
DEFAULT_PORT = 4200
START_SECONDS = HANG_SECONDS
"""How long a starting server may print nothing and use next to no CPU time. On a busy machine, it takes minutes."""

STOP_SECONDS = 10.0
LOG = "server.log"

LATE_VARIABLE, LATE_SECONDS = "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS", "600"
"""A run counts as late after ten minutes: runs wait for each other, and Prefect's 15 s would make most of them late."""

HOME = "prefect"
_LOCK = "server.lock"
_FLUSH_SECONDS = 5.0
_BUSY_SECONDS = 60.0  # a server that is running may be busy
_MOMENT_SECONDS = 1.0  # a process that looks for a running server takes a shared lock for a moment

URL_VARIABLE = "PREFECT_API_URL"
DATABASE_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
_PATH_VARIABLES = ("PREFECT_HOME", "PREFECT_PROFILES_PATH", "PREFECT_LOGGING_CONFIG_PATH")


class RunningServer(NamedTuple):
    """The Prefect server that uses a home."""

    api_url: str
    lasting: bool
    """Whether it outlives a single run, so that other commands may use it."""


def configured_api_url() -> str | None:
    """Return the API URL from PREFECT_API_URL or the active Prefect profile; None if there is none, or it is empty."""
    put(os.environ, QUIET | CLIENT | without_proxy() | _absolute_paths())
    if not os.environ.get(URL_VARIABLE):
        os.environ.pop(URL_VARIABLE, None)  # an empty one would override the profile's
    with reading_settings():
        from prefect.settings import get_current_settings

        api_url = get_current_settings().api.url or ""
    require_usable_settings()
    return api_url.rstrip("/") or None


def _absolute_paths() -> dict[str, str]:
    """Return the variables of paths, made absolute: Prefect reads its settings in another folder, as workers do."""
    given = {name: os.environ.get(name) for name in _PATH_VARIABLES}
    return {name: str(Path(path).expanduser().absolute()) for name, path in given.items() if path}


def without_proxy(host: str = HOST) -> dict[str, str]:
    """Return variables that bypass proxies for an address of this machine.

    A proxy would get the key, and its 127.0.0.1 is another machine.
    """
    names = ("no_proxy", "NO_PROXY")
    hosts = next(filter(None, map(os.environ.get, names)), "").split(",")
    with_ours = hosts if {"*", host} & set(hosts) else [*filter(None, hosts), host]
    return dict.fromkeys(names, ",".join(with_ours))


def join_configured(root: Path) -> str:
    """Make this process a client of the configured server (``join``), and return its API URL."""
    if (api_url := configured_api_url()) is None:
        raise SpecError(
            "no Prefect server is configured: set PREFECT_API_URL and PREFECT_API_AUTH_STRING, or start one with "
            "`t5-pretrain up`"
        )
    join(root, api_url)
    return api_url


def join(root: Path, api_url: str) -> None:
    """Make this process a client of a running server. If ``up`` runs that server for ``root``, use its key.

    Raises LaunchError unless the server responds and accepts this client.
    """
    if not answers(api_url, _BUSY_SECONDS):
        if UserProfiles.find().is_ours(api_url):
            raise LaunchError(
                f"no Prefect server responds at {api_url}, which the active Prefect profile {NAME} names: `t5-pretrain "
                f"up` has ended. Start it again, or use another profile: `prefect profile use {DEFAULT}`"
            )
        raise LaunchError(
            f"no Prefect server responds at {api_url}. Start that server, or unset PREFECT_API_URL (in a profile: "
            "`prefect config unset PREFECT_API_URL`) to use an embedded server"
        )
    home = root / HOME
    if os.access(home, os.R_OK | os.X_OK) and (there := _running(home)) is not None and there.api_url == api_url:
        become_client(home, api_url)
    _require_admission(api_url)


def _require_admission(api_url: str) -> None:
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    with get_client(sync_client=True) as client:
        try:
            client.read_flows(limit=1)
        except (HTTPError, ValueError) as error:  # what is not of the API can answer with anything
            code = error.response.status_code if isinstance(error, PrefectHTTPStatusError) else None
            if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise LaunchError(
                    f"the Prefect server at {api_url} rejects this client (HTTP {code}). Set PREFECT_API_AUTH_STRING, "
                    "use the profile that has it (`prefect profile use NAME`), or give the --root with which "
                    "`t5-pretrain up` was started"
                ) from error
            raise LaunchError(
                f"{api_url} does not respond as Prefect's API does ({in_one_line(error)}). Check that PREFECT_API_URL "
                "is the address of a Prefect server and ends with /api, and that the server works"
            ) from error


def answers(api_url: str, seconds: float = 5.0) -> bool:
    """Return whether a healthy Prefect server at this URL answers within some seconds."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=seconds) as response:  # noqa: S310  # the user's own URL
            return bool(response.status == 200)
    except (OSError, ValueError, HTTPException):  # the last: what answers does not speak HTTP, or the URL has spaces
        return False


def require_free_port(port: int) -> None:
    """Raise InputError if this loopback port is in use."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise InputError(_port_in_use(port, error)) from error


@contextmanager
def any_server(root: Path, progress: Progress) -> Iterator[str]:
    """Yield the API URL of the configured server, of the one that ``up`` runs for ``root``, or of a new embedded one.

    The profile that ``up`` writes does not count as configured here: ``run`` does not need a permanent server.
    """
    if (configured := configured_api_url()) is not None and not UserProfiles.find().is_ours(configured):
        join(root, configured)
        yield configured
        return
    home = next(home for home in _homes(root) if (there := _running(home)) is None or there.lasting)
    if (there := _running(home)) is not None:
        become_client(home, there.api_url)
        yield there.api_url
        return
    with own_server(home, free_port(), progress) as api_url:
        yield api_url


@contextmanager
def own_server(home: Path, port: int, progress: Progress, *, lasting: bool = False) -> Iterator[str]:
    """Run a Prefect server with its state in ``home`` within the block, and make this process its client.

    Yields the API URL. The server stops at the end of the block, and also if this process is killed. Raises RunLocked
    if another server uses ``home``, and LaunchError with the end of the log if the server does not start.
    """
    api_url = f"http://{HOST}:{port}/api"
    os.environ.update(without_proxy())
    with (
        held(home, RunningServer(api_url, lasting)),
        listening(port) as bound,
        # The key is new each time: when a server has ended, any user can take its port and get the key from clients.
        serving(home, api_url, bound, _embedded_environment(home, port, api_key.renew(home)), progress),
    ):
        become_client(home, api_url)
        try:
            yield api_url
        finally:
            _flush()


@contextmanager
def serving(
    home: Path, api_url: str, bound: socket.socket, environment: Mapping[str, str], progress: Progress
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server process on a bound socket within the block, from when it is healthy."""
    log = home / LOG
    begin = log.stat().st_size if log.exists() else 0
    server = _start(log, bound, environment)
    threading.Thread(target=_refuse_after, args=(server, bound), daemon=True).start()
    try:
        _await_health(server, api_url, log, begin, progress)
        yield server
    finally:
        stop(server, STOP_SECONDS)


def become_client(home: Path, api_url: str) -> None:
    """Make this process and its child processes clients of an embedded server.

    Prefect reads the environment only once, and ``configured_api_url`` has already made it do so. Therefore Prefect's
    settings are refreshed here.
    """
    os.environ.pop("PREFECT_PROFILE", None)  # it names a profile in the user's home, which does not exist in this home
    put(os.environ, client_environment(home, api_url, api_key.read(home)))
    with reading_settings():
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    require_usable_settings()


def key_file(api_url: str) -> Path | None:
    """Return the key file of the embedded server that this process is a client of; None for a configured server."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    is_ours = settings.api.url == api_url and is_embedded(settings.home)
    return api_key.path_of(settings.home) if is_ours else None


def is_embedded(home: Path) -> bool:
    """Return whether a home is that of a server that this program runs."""
    return (home / _LOCK).exists()


def server_environment(home: Path, port: int, key: str) -> dict[str, str]:
    """Return Prefect's settings for a server in ``home`` that requires the key.

    The UI needs the API's URL, unless the port is 4200. The UI's files are copied into the home, because Prefect may be
    installed in a folder that is not writable. The user's environment decides only what ``prefect_settings`` leaves to
    it, when a run is late, and which database a team's server uses.
    """
    server = f"http://{HOST}:{port}"
    address = {
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_API_AUTH_STRING": key,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": server,
        "PREFECT_SERVER_UI_API_URL": f"{server}/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
    }
    late = {LATE_VARIABLE: os.environ.get(LATE_VARIABLE, LATE_SECONDS)}
    return client_environment(home, f"{server}/api", key) | SERVER | address | late


def _embedded_environment(home: Path, port: int, key: str) -> dict[str, str]:
    """Return the settings of an embedded server. It never uses the database that the user has for another server."""
    return server_environment(home, port, key) | {
        DATABASE_VARIABLE: f"sqlite+aiosqlite:///{home}/prefect.db",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "10",
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "5",
    }


@contextmanager
def listening(port: int, host: str = HOST) -> Iterator[socket.socket]:
    """Yield a socket that is bound before the server starts and after it ends, so that nothing else takes its port."""
    try:
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(_port_in_use(port, error, host)) from error
    with bound:
        yield bound


def _refuse_after(server: subprocess.Popen[bytes], bound: socket.socket) -> None:
    """When the server has died, refuse its clients at once instead of letting them wait, and keep the port reserved.

    Linux reserves the port for the socket that is bound to it, unless that socket and another both allow reuse.
    """
    server.wait()
    with suppress(OSError):  # already closed if the server was stopped on purpose
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.shutdown(socket.SHUT_RDWR)


def _port_in_use(port: int, error: OSError, host: str = HOST) -> str:
    return f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port"


def _flush() -> None:
    """Send Prefect's pending events and logs while the server still runs."""
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=_FLUSH_SECONDS)
    for handler in logging.getLogger("prefect.flow_runs").handlers:
        handler.flush()


def _homes(root: Path) -> Iterator[Path]:
    """Yield the homes of a root's embedded servers, one for each server that runs at the same time."""
    yield root / HOME
    yield from (root / f"{HOME}-{number}" for number in itertools.count(2))


@contextmanager
def held(home: Path, server: RunningServer) -> Iterator[None]:
    """Lock a home for one server. The kernel releases the lock when this process ends."""
    with _lock_file(home) as file:
        if not try_lock(file.fileno(), _MOMENT_SECONDS):
            at = f" at {other.api_url}" if (other := _running(home)) and other.api_url else ""
            raise RunLocked(f"{home} is in use by another Prefect server{at}: stop that one, or give another --root")
        file.truncate(0)
        file.write(json.dumps(server._asdict()))
        file.flush()
        yield


def _lock_file(home: Path) -> TextIO:
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        # Check the folder first: in another user's folder, the file could be a link to one of our files.
        return open(private_folder(home) / _LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{home} cannot be written: {error.strerror}; choose another root (--root)") from error


def _running(home: Path) -> RunningServer | None:
    """Return the server that uses a home now; None if there is none."""
    if not is_locked(home / _LOCK):
        return None
    said = (home / _LOCK).read_text("utf-8")
    return RunningServer(**json.loads(said)) if said else RunningServer("", lasting=False)  # just starting


def _start(log: Path, bound: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the server in a new session, so that Ctrl-C reaches only the flow, which still reports to the server.

    -P keeps modules in the user's current folder from shadowing libraries.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PREFECT_PROFILE"}
    put(variables, environment)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.server.server_process", str(bound.fileno())],
            pass_fds=[bound.fileno()],
            env=variables,
            cwd=NEUTRAL_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _await_health(server: subprocess.Popen[bytes], api_url: str, log: Path, begin: int, progress: Progress) -> None:
    of_first = "" if begin else " (the first start takes longest: it creates the database)"
    what = f"s since Prefect's server was started{of_first}"
    with open(log, "rb") as output:
        await_start(
            server,
            f"Prefect's server did not start (its log is {log}): it",
            lambda: answers(api_url),
            output,
            begin,
            lambda seconds: progress(what, int(seconds), None),
            START_SECONDS,
        )


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Stop a child process with SIGTERM, or with SIGKILL if it does not end in time."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
