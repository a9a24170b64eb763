"""The faults of ``operation_kills.py``, each injected into a run that trains under Prefect."""

import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.testcluster.namespaces import HEAD
from tests.acceptance.operation.operation_site import DATABASE, SERVER, Site

_LOCK = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
time.sleep(float(sys.argv[2]))
"""


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    strike: Callable[[Site, str, random.Random], None]
    """Injects the fault into the run with this id. An outage is over when it returns."""
    is_outage: bool = False
    """Whether time counts from the end of ``strike``, because Prefect can show nothing before."""
    window: float = 60.0
    """Seconds in which Prefect must show the right state."""


def _kill_flow(site: Site, run: str, _random: random.Random) -> None:
    flow = site.flow(run)
    assert flow is not None
    flow.send(signal.SIGKILL)


def _power_cycle_head(site: Site, _run: str, seeded: random.Random) -> None:
    site.power_cycle_head(off_seconds=seeded.uniform(0, 5))


def _switch_head_off(site: Site, run: str, _random: random.Random) -> None:
    site.cluster.power_cut(HEAD)
    site.await_that(lambda: site.shown(run).state_name == "Lost", seconds=400)
    site.power_cycle_head(off_seconds=0)


def _kill_server(site: Site, _run: str, seeded: random.Random) -> None:
    site.kill(SERVER, *seeded.choice([("t5-pretrain", "server"), ("flows.server.server_process",)]))


def _restart_server(site: Site, _run: str, _random: random.Random) -> None:
    site.cluster.exec(SERVER, ["pkill", "--full", "--signal=TERM", "t5-pretrain server"]).check_returncode()


def _lock_database(site: Site, _run: str, seeded: random.Random) -> None:
    argv = [sys.executable, "-c", _LOCK, DATABASE, str(seeded.uniform(10, 40))]
    site.cluster.exec(SERVER, argv).check_returncode()


def _cut_network(site: Site, _run: str, seeded: random.Random) -> None:
    site.cluster.set_link(SERVER, "down")
    time.sleep(seeded.uniform(10, 40))
    site.cluster.set_link(SERVER, "up")


FAULTS = (
    Fault("the worker is killed", lambda site, *_: site.kill(HEAD, "t5-pretrain", "worker")),
    Fault("the process of Prefect in the worker is killed", lambda site, *_: site.kill(HEAD, "flows.workers.worker")),
    Fault("the flow is killed", _kill_flow),
    Fault("the head loses power, and is started again", _power_cycle_head),
    Fault("the head loses power, and stays off until its run is lost", _switch_head_off, window=400.0),
    Fault("the server is killed", _kill_server),
    Fault("the server is restarted", _restart_server),
    Fault("the server's database is locked for 10 to 40 s", _lock_database, is_outage=True),
    Fault("the network to the server is cut for 10 to 40 s", _cut_network, is_outage=True),
)
