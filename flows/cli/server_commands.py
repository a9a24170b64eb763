"""``deploy`` and ``up``: create Prefect's pool and deployments, and run its server and a worker."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flows import api_key, prefect_profile, prefect_server
from flows.cli.options import RootOption, root_of
from flows.cli.terminal import complain, progress_display, say
from flows.worker import STOP_SECONDS
from infra.node import processes
from t5train.errors import InputError, LaunchError, SpecError, StorageError
from t5train.spec.recipes import RECIPES

LOOK_SECONDS = 10.0
"""Time between checks for runs whose process was killed."""

RUN_SECONDS = 60.0
"""Time for a run to save and shut down gracefully, as after SIGTERM to `t5-pretrain run`."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(deploy)
    app.command()(up)


def deploy(root: RootOption = None) -> None:
    """Create the work pool and the deployments on the configured Prefect server; can be repeated safely."""
    api_url = prefect_server.configured_api_url()
    if api_url is None:
        raise SpecError("no Prefect server is configured: set PREFECT_API_URL, or start one with `t5-pretrain up`")
    prefect_server.join(root_of(root), api_url)
    _deploy(root_of(root))


def up(
    root: RootOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server, on this machine only")] = (
        prefect_server.DEFAULT_PORT
    ),
) -> None:
    """Run a Prefect server with the pool, the deployments and a worker on this machine, until Ctrl-C."""
    prefect_server.require_free_port(port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's SIGTERM acts like Ctrl-C
    home = root_of(root) / prefect_server.HOME
    profiles = prefect_profile.UserProfiles.find()
    with (
        progress_display() as progress,
        prefect_server.own_server(home, port, progress, lasting=True) as api_url,
    ):
        _deploy(root_of(root))
        _close_runs_of_pool()
        with _worker(home / "worker.log") as worker:
            _explain(profiles, home, api_url)
            code = _await_end(worker)
            raise LaunchError(f"the worker ended with exit code {code}: see {home / 'worker.log'}")


def _explain(profiles: prefect_profile.UserProfiles, home: Path, api_url: str) -> None:
    commands = "".join(f"\n    {line}" for line in _how_to_run(profiles, home, api_url))
    say(f"Prefect is at {api_url.removesuffix('/api')}; Ctrl-C stops it with all its runs. Its UI asks for a key:")
    say(f"    cat {shlex.quote(str(api_key.path_of(home)))}")
    say(f"To start a run, type{commands}")


def _how_to_run(profiles: prefect_profile.UserProfiles, home: Path, api_url: str) -> Iterator[str]:
    """Yield commands that start a run in another shell with the same environment."""
    run = f"{shlex.quote(str(_prefect()))} deployment run t5-pretrain/smoke"
    try:
        is_in_use = profiles.write(api_url, api_key.read(home))
    except (InputError, StorageError) as error:
        complain(f"the Prefect profile {prefect_profile.NAME} was not written: {error}")
        key = f'"$(cat {shlex.quote(str(api_key.path_of(home)))})"'
        yield f"PREFECT_API_URL={api_url} PREFECT_API_AUTH_STRING={key} {run}"
        return
    if profiles.overrides:
        yield f"unset {' '.join(profiles.overrides)}"
    if not is_in_use:
        yield f"{shlex.quote(str(_prefect()))} profile use {prefect_profile.NAME}"
    yield run


def _await_end(worker: subprocess.Popen[bytes]) -> int:
    """Wait for the worker, and return its exit code. Until then, close abandoned runs of the server's other clients."""
    while True:
        try:
            return worker.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            _close_abandoned_runs()


@contextmanager
def _worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker of the pool within the block. Its runs are stopped first, because the worker would kill them."""
    from flows.deploy import POOL

    with open(log, "ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.worker", POOL],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=prefect_server.NEUTRAL_FOLDER,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the worker before its server
        )
    try:
        yield worker
    finally:
        try:
            _end_runs(processes.child_of(worker.pid))
        finally:  # also after a second Ctrl-C: the worker kills the remaining runs
            prefect_server.stop(worker, STOP_SECONDS)


def _end_runs(of_worker: processes.Belongs) -> None:
    if processes.find(of_worker):
        say(f"waiting up to {RUN_SECONDS:.0f} s for runs to save and stop; press Ctrl-C to stop them at once")
        processes.end(of_worker, RUN_SECONDS)


def _close_runs_of_pool() -> None:
    from flows.abandoned import (
        close_abandoned_runs,
        close_runs_of_pool,  # imports Prefect, as in _deploy
    )

    for name in [*close_abandoned_runs(), *close_runs_of_pool()]:
        say(f"run {name!r} lost its worker and is now closed in Prefect; start the same run again to resume it")


def _close_abandoned_runs() -> None:
    from flows.abandoned import close_abandoned_runs

    try:
        closed = close_abandoned_runs()
    except Exception as error:  # any error of Prefect's client, such as for a busy server, must not end all runs
        complain(f"could not close killed runs in Prefect, will retry: {type(error).__name__}: {error}")
        return
    for name in closed:
        say(f"run {name!r} was killed and is now closed in Prefect; start the same run again to resume it")


def _deploy(root: Path) -> None:
    from flows.deploy import deploy as deploy_all  # imports Prefect, which reads its settings when it is imported

    deploy_all(root)
    say(f"deployed: {', '.join(f't5-pretrain/{recipe}' for recipe in RECIPES)}")


def _prefect() -> Path:
    """Return the path of Prefect's command, in the same folder as the Python interpreter."""
    return Path(sys.executable).with_name("prefect")
