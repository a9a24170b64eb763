"""Which Prefect server a command talks to: the one that is configured, or one of its own."""

import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from infra.ports import free_port
from t5train.errors import InputError, LaunchError, RunLocked, StorageError
from t5train.file_lock import is_locked, try_lock
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
    os.environ.update(QUIET)
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def require_answer(api_url: str) -> None:
    """LaunchError unless a Prefect server answers under this URL."""
    if not answers(api_url):
        raise LaunchError(
            f"no Prefect server answers at {api_url}: start it, or unset PREFECT_API_URL "
            "(or `prefect config unset PREFECT_API_URL`) to use an embedded one"
        )


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
        raise InputError(
            f"port {port} of {HOST} cannot be used ({error.strerror}): choose another with --port"
        ) from error


@contextmanager
def any_server(root: Path, progress: Progress) -> Iterator[str]:
    """The API's URL of the configured server, else of one that ``up`` runs for ``root``, else of one of our own."""
    if (configured := configured_api_url()) is not None:
        require_answer(configured)
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
    environment = server_environment(home, port)
    with _held(home, RunningServer(environment["PREFECT_API_URL"], lasting)):
        server = _start(home, port, environment)
        try:
            _await_health(server, environment["PREFECT_API_URL"], home / LOG, progress)
            become_client(home, environment["PREFECT_API_URL"])
            try:
                yield environment["PREFECT_API_URL"]
            finally:
                _flush()
        finally:
            stop(server, STOP_SECONDS)


def become_client(home: Path, api_url: str) -> None:
    """Make this process, and those that it starts, clients of a server.

    Prefect reads the environment once, and ``configured_api_url`` made it do so.
    """
    from prefect.context import refresh_global_settings_context

    os.environ.update({"PREFECT_HOME": str(home), "PREFECT_API_URL": api_url})
    refresh_global_settings_context()


def server_environment(home: Path, port: int) -> dict[str, str]:
    """Prefect's settings for a server in ``home`` and for its clients.

    The page asks the API at the URL it is told, which a port other than 4200 makes necessary to tell. The page's
    files are copied into the home, as Prefect itself may be installed where we cannot write.
    """
    api_url = f"http://{HOST}:{port}/api"
    return QUIET | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_UI_API_URL": api_url,
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
    }


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
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(home / _LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{home} cannot be written: {error.strerror}; choose another root (--root)") from error


def _running(home: Path) -> RunningServer | None:
    """The server that holds a home now."""
    if not is_locked(home / _LOCK):
        return None
    said = (home / _LOCK).read_text("utf-8")
    return RunningServer(**json.loads(said)) if said else RunningServer("", lasting=False)  # begun this instant


def _start(home: Path, port: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C must reach the flow, which then still reports to this server.

    With -P, as a stray module in the user's current folder would else be taken for a library's.
    """
    with open(home / LOG, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.serve", HOST, str(port)],
            env=os.environ | environment,
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
