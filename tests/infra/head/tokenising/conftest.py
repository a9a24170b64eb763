import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.head.tokenising.hosts_executor import workers_for
from t5train.data.worker_processes import Workers
from t5train.spec import ClusterSpec, ShardsSpec
from tests.support.waiting import await_that

ROOT = Path(__file__).parents[4]
# In the place of ssh: a command runs on this machine, with the variable that sshd sets. {folder} gets a file of each
# host with the pid of its connection.
SSH = """#!/bin/sh
[ "$1" != -G ] || exit 0  # a question about its settings
export SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22"
echo $$ > "{folder}/$4.pid"
cd /
exec sh -c "$5"
"""
# What jobs do. They hold no range of text here: "folder" is where they leave traces.
JOBS = """
import os, signal, time
from pathlib import Path
from t5train.errors import InputError

def begun(job):
    path = Path(job["folder"]) / f"{job['number']}.begun"
    with open(path, "a") as file:
        print(os.getpid(), file=file)
    return len(path.read_text().splitlines())

def finish(job, advance):
    advance(job["number"])
    begun(job)
    time.sleep(job["seconds"])
    advance(10)
    return {"number": job["number"]}

def refuse(job, advance):
    begun(job)
    raise InputError("the file has no text. Name another")

def die_once(job, advance):
    if begun(job) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": job["number"]}

def die_on_sick_host(job, advance):
    deaths = Path(job["folder"]) / "deaths"
    if "SICK" in os.environ:
        with open(deaths, "a") as file:
            print(job["number"], file=file)
        os.kill(os.getpid(), signal.SIGKILL)
    while not deaths.exists() or len(deaths.read_text().splitlines()) < 3:
        time.sleep(0.05)  # or this host might do all jobs before the other has tried three
    return {"number": job["number"]}

def hang_on_sick_host(job, advance):
    begun(job)
    time.sleep(600 if "SICK" in os.environ else 0)
    return {"number": job["number"]}

def read_nothing(job, advance):
    begun(job)
    Path("/dev/null/none").read_bytes()

def die(job, advance):
    begun(job)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Site:
    """Names of this machine, as hosts, and the folder of the jobs."""

    def __init__(self, folder: Path, hosts: Sequence[str] = ("one", "two")) -> None:
        self.folder, self.hostfile = folder, folder / "hosts"
        self.hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))

    def workers(self, processes: int = 1, lease_seconds: float = 5) -> Workers:
        cluster = ClusterSpec(hostfile=self.hostfile, lease_seconds=lease_seconds)
        found = workers_for(ShardsSpec(executor="dask", workers=processes), cluster)
        assert found is not None
        return found

    def jobs(self, number: int, seconds: float = 0) -> list[dict[str, object]]:
        common = {"seconds": seconds, "folder": str(self.folder), "stretches": []}
        return [common | {"number": each, "description": f"shard-{each:05d}.json"} for each in range(number)]

    def begun(self) -> int:
        """How many jobs have begun."""
        return len(list(self.folder.glob("*.begun")))

    def kill(self, *hosts: str, begun: int) -> None:
        """Kill all processes of hosts when so many jobs have begun."""
        await_that(lambda: self.begun() >= begun)
        for host in hosts:
            self._kill(host)

    def _kill(self, host: str) -> None:
        connection = psutil.Process(int((self.folder / f"{host}.pid").read_text()))
        for process in [connection, *connection.children(recursive=True)]:
            process.kill()


@contextmanager
def hosts_of_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have ssh run commands on this machine. Yields the script in its place; at the end, no process must be left."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(folder=folder))
    ssh.chmod(0o755)
    (folder / "some_jobs.py").write_text(JOBS)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")
    before = set(psutil.Process().children(recursive=True))
    yield ssh
    left = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(left, timeout=120)[1]
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site of the test's own, of which no process is left when the test ends."""
    with hosts_of_this_machine(tmp_path, monkeypatch):
        yield Site(tmp_path)


@pytest.fixture
def do(site: Site) -> Callable[..., list[dict[str, object]]]:
    """``do(name, jobs)`` has the jobs done by the function of that name, and returns the results."""

    def do(name: str, jobs: list[dict[str, object]], advance: Callable[[int], None] = int) -> list[dict[str, object]]:
        return list(site.workers()(f"some_jobs:{name}", jobs, advance))

    return do
