"""A host on which jobs hang is given up, and a scheduler that hangs ends the work.

All cases are tried at the same time, on hosts of their own, because each waits for most of a minute.
"""

import logging
import re
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import BufferingHandler
from typing import NamedTuple

import psutil
import pytest

from t5train.errors import WorkerLost
from tests.infra.head.tokenising.conftest import Site, hosts_of_this_machine
from tests.support.waiting import await_that

pytestmark = pytest.mark.slow
HANG_SECONDS = 12.0
SICK = 'case "$4" in sick*) export SICK=1;; esac'
SCHEDULER = "the scheduler hangs"
Results = list[dict[str, object]]


class Case(NamedTuple):
    """Jobs on hosts. Jobs hang on hosts with names that begin with "sick"."""

    hosts: tuple[str, ...]
    function: str
    jobs: int
    seconds: float = 0


CASES = {
    SCHEDULER: Case(("one", "two"), "finish", 2, seconds=600),
    "a host hangs": Case(("sick-1", "well-1"), "hang_on_sick_host", 4),
    "all hosts hang": Case(("sick-2", "sick-3"), "hang_on_sick_host", 2),
    "a job hangs": Case(("sick-4", "sick-5", "sick-6", "sick-7"), "hang_on_sick_host", 1),
}


class Tried(NamedTuple):
    """The outcome of each case, and all that was logged."""

    outcomes: dict[str, "Future[Results]"]
    log: str

    def error(self, case: str) -> str:
        with pytest.raises(WorkerLost) as raised:
            self.outcomes[case].result()
        return str(raised.value)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """All cases, after their end. Hosts count as hung soon."""
    folder = tmp_path_factory.mktemp("hung")
    handler = BufferingHandler(10_000)
    logger = logging.getLogger("infra.head.tokenising")

    def do(case: Case) -> Results:
        place = folder / case.hosts[0]
        place.mkdir()
        site = Site(place, case.hosts)
        return list(site.workers()(f"some_jobs:{case.function}", site.jobs(case.jobs, case.seconds), int))

    with pytest.MonkeyPatch.context() as patch, hosts_of_this_machine(folder, patch) as ssh:
        ssh.write_text(ssh.read_text().replace("exec sh", f"{SICK}\nexec sh"))
        patch.setattr("infra.head.tokenising.hosts_executor._HANG_SECONDS", HANG_SECONDS)
        logger.addHandler(handler)
        with ThreadPoolExecutor(len(CASES)) as threads:
            outcomes = {SCHEDULER: threads.submit(do, CASES[SCHEDULER])}
            await_that(lambda: len(list(folder.glob("one/*.begun"))) == 2 or outcomes[SCHEDULER].done())
            suspend_the_scheduler()  # the only one so far
            outcomes |= {name: threads.submit(do, case) for name, case in CASES.items() if name != SCHEDULER}
        logger.removeHandler(handler)
    return Tried(outcomes, "\n".join(record.getMessage() for record in handler.buffer))


def suspend_the_scheduler() -> None:
    mark = "infra.head.tokenising.dask_scheduler"
    (scheduler,) = (each for each in psutil.Process().children() if mark in each.cmdline())
    scheduler.suspend()


def test_jobs_of_a_host_on_which_they_hang_are_done_by_the_other(tried: Tried) -> None:
    results = tried.outcomes["a host hangs"].result()
    assert sorted(str(each["number"]) for each in results) == ["0", "1", "2", "3"]
    told = r"sick-1: shard-0000\d.* made no progress for 12 s\. If .*The other hosts make its shards"
    assert re.search(told, tried.log)


def test_when_jobs_hang_on_all_hosts_the_error_names_hosts_shards_and_time(tried: Tried) -> None:
    error = tried.error("all hosts hang")
    assert re.search(r"no host is left to tokenise: .*run this again", error)
    for host in "sick-2", "sick-3":
        assert re.search(rf"{host}: shard-0000\d made no progress for 12 s\. If its disks", error)


def test_a_job_with_which_three_hosts_hang_ends_the_work(tried: Tried) -> None:
    said = r"^shard-00000 made no progress for 12 s on each of sick-\d, sick-\d, sick-\d\. Check"
    assert re.search(said, tried.error("a job hangs"))


def test_a_scheduler_that_hangs_ends_the_work(tried: Tried) -> None:
    assert "scheduler on this machine has reported nothing for 24 s" in tried.error(SCHEDULER)
