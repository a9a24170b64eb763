"""``deploy`` and ``up``: Prefect's server, pool, deployments and worker."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flows import prefect_server
from flows.options import RootOption, root_of
from flows.terminal import progress_display, say
from flows.work import STOP_SECONDS
from infra import processes
from t5train.errors import LaunchError, SpecError
from t5train.recipes import RECIPES

RUN_SECONDS = 60.0
"""For a run to save and end in order, as after a SIGTERM to `t5-pretrain run`."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(deploy)
    app.command()(up)


def deploy(root: RootOption = None) -> None:
    """Make work pool and deployments on the configured Prefect server; again changes nothing."""
    api_url = prefect_server.configured_api_url()
    if api_url is None:
        raise SpecError("no Prefect server is configured: set PREFECT_API_URL, or start one with `t5-pretrain up`")
    prefect_server.require_answer(api_url)
    _deploy(root_of(root))


def up(
    root: RootOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the server, on this machine only")] = (
        prefect_server.DEFAULT_PORT
    ),
) -> None:
    """Start a Prefect server, the pool, the deployments and a worker for this machine, until Ctrl-C."""
    prefect_server.require_free_port(port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager's stop is a Ctrl-C
    home = root_of(root) / prefect_server.HOME
    with (
        progress_display() as progress,
        prefect_server.own_server(home, port, progress, lasting=True) as api_url,
    ):
        _deploy(root_of(root))
        _close_abandoned_runs()
        with _worker(home / "worker.log") as worker:
            say(f"Prefect is at {api_url.removesuffix('/api')}; Ctrl-C ends it with all its runs. To start a run, type")
            say(f"    PREFECT_API_URL={api_url} {_prefect()} deployment run t5-pretrain/smoke")
            code = worker.wait()
            raise LaunchError(f"the worker ended with exit code {code}; {home / 'worker.log'} says why")


@contextmanager
def _worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of the pool, alive for the block; its runs are told to end before it, which else kills them."""
    from flows.deploy import POOL

    with open(log, "ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.work", POOL],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C comes to us, who end the worker before its server
        )
    try:
        yield worker
    finally:
        try:
            _end_runs(processes.child_of(worker.pid))
        finally:  # also after another Ctrl-C: the worker kills what still runs
            prefect_server.stop(worker, STOP_SECONDS)


def _end_runs(of_worker: processes.Belongs) -> None:
    if processes.find(of_worker):
        say(f"runs save and end, for which they have {RUN_SECONDS:.0f} s; Ctrl-C ends them at once")
        processes.end(of_worker, RUN_SECONDS)


def _close_abandoned_runs() -> None:
    from flows.abandoned import close_abandoned_runs  # brings Prefect, as above

    for name in close_abandoned_runs():
        say(f"run {name!r} had lost its worker and is closed; the same run started again resumes where it stood")


def _deploy(root: Path) -> None:
    from flows.deploy import deploy as deploy_all  # brings Prefect, which reads its settings when it is imported

    deploy_all(root)
    say(f"deployed: {', '.join(f't5-pretrain/{recipe}' for recipe in RECIPES)}")


def _prefect() -> Path:
    """Prefect's own command, which lies beside the interpreter."""
    return Path(sys.executable).with_name("prefect")
