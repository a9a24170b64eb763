"""Which Prefect server a command talks to: the one that is configured, or one of its own."""

import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, TextIO

from flows import api_key, run_records
from flows.prefect_profile import UserProfiles
from infra.node.ports import free_port
from t5train.errors import InputError, LaunchError, RunLocked, StorageError
from t5train.files.locks import is_locked, private_folder, try_lock
from t5train.progress import Progress

HOST = "127.0.0.1"
DEFAULT_PORT = 4200
START_SECONDS = 120.0
STOP_SECONDS = 10.0
LOG = "server.log"

HOME = "prefect"
_LOCK = "server.lock"
_FLUSH_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_MOMENT_SECONDS = 1.0  # who looks for a running server shares its lock for an instant

NEUTRAL_FOLDER = "/"
"""Where processes read Prefect's settings, which it also takes from .env, prefect.toml and pyproject.toml of the
current folder. Whoever can write such a file there could name a logging configuration, which runs code, or another
server, which is then sent the user's key.
"""

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
}
"""Settings with which neither Prefect's client nor its server tells anybody anything."""


class RunningServer(NamedTuple):
    """What the holder of a home says of its server."""

    api_url: str
    lasting: bool
    """Whether others may use it, as it does not end with one run."""


def configured_api_url() -> str | None:
    """URL of the API in PREFECT_API_URL or the active Prefect profile; None when there is none."""
    os.environ.update(QUIET | _without_proxy())
    with chdir(NEUTRAL_FOLDER):
        from prefect.settings import get_current_settings

        return get_current_settings().api.url


def _without_proxy() -> dict[str, str]:
    """Settings with which no client asks a proxy for this machine: it would be sent the key and reach another one."""
    names = ("no_proxy", "NO_PROXY")
    hosts = next(filter(None, map(os.environ.get, names)), "").split(",")
    with_ours = hosts if {"*", HOST} & set(hosts) else [*filter(None, hosts), HOST]
    return dict.fromkeys(names, ",".join(with_ours))


def join(root: Path, api_url: str) -> None:
    """Make this process a client of a server that runs already, with the key of the one that ``up`` runs for ``root``.

    Raises LaunchError unless the server answers and admits this client.
    """
    if not answers(api_url):
        raise LaunchError(
            f"no Prefect server answers at {api_url}: start it, or unset PREFECT_API_URL "
            "(or `prefect config unset PREFECT_API_URL`) to use an embedded one"
        )
    home = root / HOME
    if os.access(home, os.R_OK | os.X_OK) and (there := _running(home)) is not None and there.api_url == api_url:
        become_client(home, api_url)
    _require_admission(api_url)


def _require_admission(api_url: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    with get_client(sync_client=True) as client:
        try:
            client.read_flows(limit=1)
        except PrefectHTTPStatusError as error:
            if error.response.status_code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise
            raise LaunchError(
                f"the Prefect server at {api_url} does not admit this client (HTTP {error.response.status_code}): set "
                "PREFECT_API_AUTH_STRING, use the profile that has it (`prefect profile use NAME`), or give the --root "
                "of the server"
            ) from error


def answers(api_url: str) -> bool:
    """Whether a Prefect server under this URL is healthy."""
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=5) as response:  # noqa: S310  # the user's own URL
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def require_free_port(port: int) -> None:
    """InputError when something listens on this loopback port."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise InputError(_port_in_use(port, error)) from error


@contextmanager
def any_server(root: Path, progress: Progress) -> Iterator[str]:
    """The API's URL of the configured server, else of one that ``up`` runs for ``root``, else of one of our own.

    The profile that ``up`` writes configures the command line only: ``run`` needs no server that keeps running.
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
    """A Prefect server with its state in ``home``, alive for the block; this process is made its client.

    Yields the API's URL. The server ends with the block, and also when this process is killed. RunLocked when
    another server uses ``home``, LaunchError with the end of its log when it does not start.
    """
    api_url = f"http://{HOST}:{port}/api"
    os.environ.update(_without_proxy())
    with _held(home, RunningServer(api_url, lasting)), _listening(port) as listening:
        # New each time: once a server has ended its port is free for anybody, to whom clients then show the old key.
        server = _start(home, listening, server_environment(home, port, api_key.renew(home)))
        threading.Thread(target=_refuse_after, args=(server, listening), daemon=True).start()
        try:
            _await_health(server, api_url, home / LOG, progress)
            become_client(home, api_url)
            try:
                yield api_url
            finally:
                _flush()
        finally:
            stop(server, STOP_SECONDS)


def become_client(home: Path, api_url: str) -> None:
    """Make this process, and those that it starts, clients of an embedded server.

    Prefect reads the environment once, and ``configured_api_url`` made it do so.
    """
    os.environ.pop("PREFECT_PROFILE", None)  # one of the user's own home, which this home lacks
    os.environ.update(_client_environment(home, api_url, api_key.read(home)))
    with chdir(NEUTRAL_FOLDER):
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def key_file(api_url: str) -> Path | None:
    """The key's file of the embedded server that this process is a client of; None where another one is configured."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    is_ours = settings.api.url == api_url and _is_embedded(settings.home)
    return api_key.path_of(settings.home) if is_ours else None


def _is_embedded(home: Path) -> bool:
    return (home / _LOCK).exists()


def records_folder() -> Path:
    """Where records of the flow runs of the server that this process is a client of are kept."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    return run_records.folder_of(settings.home, None if _is_embedded(settings.home) else settings.api.url)


def server_environment(home: Path, port: int, key: str) -> dict[str, str]:
    """Prefect's settings for a server in ``home``, which only holders of the key may use.

    The page asks the API at the URL it is told, which a port other than 4200 makes necessary to tell. The page's
    files are copied into the home, as Prefect itself may be installed where we cannot write. Of a setting's names
    the one that Prefect looks up first is set, so that no other in the user's environment goes before it.
    """
    server = f"http://{HOST}:{port}"
    return _client_environment(home, f"{server}/api", key) | {
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_API_AUTH_STRING": key,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": server,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_UI_API_URL": f"{server}/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
    }


def _client_environment(home: Path, api_url: str, key: str) -> dict[str, str]:
    return QUIET | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_API_AUTH_STRING": key,
        "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "true",
    }


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """Bound before the server's process starts and after it has ended, so that nobody else can answer in its place."""
    try:
        listening = socket.create_server((HOST, port))
    except OSError as error:
        raise InputError(_port_in_use(port, error)) from error
    with listening:
        yield listening


def _refuse_after(server: subprocess.Popen[bytes], listening: socket.socket) -> None:
    """Have clients of a server that has died refused at once, rather than wait; the port stays ours.

    Linux keeps a port for a socket that was bound to it by number, unless both that and the next allow its reuse.
    """
    server.wait()
    with suppress(OSError):  # closed by now, where the server was ended on purpose
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        listening.shutdown(socket.SHUT_RDWR)


def _port_in_use(port: int, error: OSError) -> str:
    return f"port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port"


def _flush() -> None:
    """Send what Prefect still has to tell its server, as it would look in vain for one that has ended."""
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=_FLUSH_SECONDS)
    for handler in logging.getLogger("prefect.flow_runs").handlers:
        handler.flush()


def _homes(root: Path) -> Iterator[Path]:
    """Where embedded servers of a root keep their state: one for each that runs at the same time."""
    yield root / HOME
    yield from (root / f"{HOME}-{number}" for number in itertools.count(2))


@contextmanager
def _held(home: Path, server: RunningServer) -> Iterator[None]:
    """Hold a home for one server; the kernel lets go when this process ends."""
    with _lock_file(home) as file:
        if not try_lock(file.fileno(), _MOMENT_SECONDS):
            raise RunLocked(f"{home} is in use by another Prefect server: end that one, or give another --root")
        file.truncate(0)
        file.write(json.dumps(server._asdict()))
        file.flush()
        yield


def _lock_file(home: Path) -> TextIO:
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        # First of all: in another user's folder the file could be a link to one of ours, which is about to be written.
        return open(private_folder(home) / _LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{home} cannot be written: {error.strerror}; choose another root (--root)") from error


def _running(home: Path) -> RunningServer | None:
    """The server that holds a home now."""
    if not is_locked(home / _LOCK):
        return None
    said = (home / _LOCK).read_text("utf-8")
    return RunningServer(**json.loads(said)) if said else RunningServer("", lasting=False)  # begun this instant


def _start(home: Path, listening: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C must reach the flow, which then still reports to this server.

    With -P, as a stray module in the user's current folder would else be taken for a library's.
    """
    with open(home / LOG, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.server_process", str(listening.fileno())],
            pass_fds=[listening.fileno()],
            env=os.environ | environment,
            cwd=NEUTRAL_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _await_health(server: subprocess.Popen[bytes], api_url: str, log: Path, progress: Progress) -> None:
    started = time.monotonic()
    what = "s, Prefect's server starts (the first time it makes its database)"
    while not answers(api_url):
        waited = time.monotonic() - started
        if server.poll() is not None or waited > START_SECONDS:
            raise LaunchError(f"Prefect's server did not start within {waited:.0f} s; {log} ends with:\n{_end(log)}")
        progress(what, int(waited), None)
        time.sleep(_LOOK_SECONDS)


def _end(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-5:])


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a child: SIGTERM, and SIGKILL when that did not help in time."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
