"""``worker``: take runs from a Prefect server, close those that are abandoned, and resume those that crashed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flows.cli.interruption import interrupt_on_stop
from flows.cli.options import RootOption, root_of
from flows.cli.terminal import complain, say
from flows.server import prefect_server
from flows.server.prefect_settings import NEUTRAL_FOLDER
from flows.workers import run_records
from flows.workers.worker import DRAIN, STOP_SECONDS
from infra.node import processes
from infra.node.attempts.process_guard import stopping_attempts
from t5train.errors import LaunchError
from t5train.files.os_errors import in_one_line

if TYPE_CHECKING:
    from flows.workers.run_monitor import RunMonitor  # imports Prefect, which reads its settings when it is imported

LOOK_SECONDS = 10.0
"""Time between checks for runs whose process was killed."""

RUN_SECONDS = 60.0
"""Time for a run to save and shut down gracefully, as after SIGTERM to `t5-pretrain run`."""

SAVE_LOOK_SECONDS = 1.0

HEARTBEATS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
"""Seconds between the events with which a run shows that it is alive.

The automation and the run monitors rely on them to find lost runs.
"""


def worker(root: RootOption = None) -> None:
    """Run the pool's runs on this machine, for the configured Prefect server, and resume crashed ones, until Ctrl-C.

    $ t5-pretrain worker
    """
    interrupt_on_stop()
    api_url = prefect_server.join_configured(root_of(root))
    _require_pool(api_url)
    run_worker(
        None,
        lambda: say(f"taking runs from {api_url.removesuffix('/api')} as {run_records.worker_name()}; Ctrl-C ends"),
    )


def run_worker(log: Path | None, announce: Callable[[], None]) -> NoReturn:
    """Run a worker and its run monitor until the worker ends, which raises LaunchError, or until Ctrl-C.

    The worker's output goes to ``log``, or where that of this process goes. ``announce`` is called when it has started.
    """
    from flows.workers.run_monitor import RunMonitor

    with run_records.only_worker(run_records.records_folder()) as name:
        monitor = RunMonitor(name)
        _report(monitor.begin())
        _check(monitor.skip_late)
        with worker_process(name, log) as process:
            announce()
            code = _await_end(process, monitor)
            raise LaunchError(
                f"the worker ended with exit code {code}; {log or 'its output above'} shows why. Start it again: it "
                "resumes its runs"
            )


@contextmanager
def worker_process(name: str, log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker of the pool within the block. Its runs are stopped first, because the worker would kill them.

    Ranks that are saving a checkpoint may outlive their run. The block ends after them, because a service manager kills
    what is left when this process has ended.
    """
    from flows.deployment.definitions import POOL

    with open(log, "ab") if log else nullcontext() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.workers.worker", POOL, name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | HEARTBEATS,
            cwd=NEUTRAL_FOLDER,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the worker before its server
        )
    try:
        yield process
    finally:
        try:
            process.send_signal(DRAIN)  # else it would start another run in place of one that ends
            _end_runs(processes.child_of(process.pid))
        finally:  # also after a second Ctrl-C: the worker kills the remaining runs
            prefect_server.stop(process, STOP_SECONDS)
        _await_saves()


def _await_end(process: subprocess.Popen[bytes], monitor: "RunMonitor") -> int:
    """Wait for the worker, and return its exit code. Until then, report, close and resume runs."""
    while True:
        _check(monitor.news)
        _check(monitor.check)
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _check(check: Callable[[], Iterable[str]]) -> None:
    try:
        _report(check())
    except Exception as error:  # any error of Prefect's client, such as for a busy server, must not end all runs
        complain(f"could not look after the runs in Prefect, will retry: {in_one_line(error)}")


def _report(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _end_runs(of_worker: processes.Belongs) -> None:
    if processes.find(of_worker):
        say(f"waiting up to {RUN_SECONDS:.0f} s for runs to save and stop; press Ctrl-C to stop them at once")
        processes.end(of_worker, RUN_SECONDS)


def _await_saves() -> None:
    """Wait for ranks that are completing a save. Their guards end one that takes too long."""
    if saving := stopping_attempts():
        say(f"waiting for ranks to save ({', '.join(map(str, sorted(saving)))}); press Ctrl-C to leave them alone")
    while stopping_attempts():
        time.sleep(SAVE_LOOK_SECONDS)


def _require_pool(api_url: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    from flows.deployment.definitions import POOL

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(POOL)
        except ObjectNotFound as error:
            raise LaunchError(
                f"the Prefect server at {api_url} has no work pool {POOL!r}: type `t5-pretrain deploy` once, with the "
                "same PREFECT_API_URL"
            ) from error
