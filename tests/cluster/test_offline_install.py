"""A wheelhouse becomes an environment on hosts that reach no other network, verified there; what exists stays."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.head.environments.wheelhouse import Wheelhouse
from infra.node.environment_installer import MARKER
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME, HOSTFILE
from tests.support.tiny_wheels import wheelhouse_of, write_wheel

pytestmark = pytest.mark.cluster

Installer = Callable[..., subprocess.CompletedProcess[str]]
ENVIRONMENT = f"{HOME}/envs/new"
WHEELS = f"{HOME}/wheels"
NODES = ("node0", "node1")


@pytest.fixture(scope="module")
def offline() -> Iterator[Cluster]:
    """A head and two nodes whose only network is the cluster's own."""
    with Cluster.temporary(f"offline-{os.getpid()}", nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def wheelhouse(offline: Cluster) -> Wheelhouse:
    """Two small wheels on the head, of which one needs the other."""
    folder = offline.disk("head", WHEELS)
    folder.mkdir()
    first = write_wheel(folder, "first", requires=["second>=1"])
    return wheelhouse_of(folder, [first, write_wheel(folder, "second")])


def command(into: str, hostfile: str) -> list[str]:
    settings = ["--set", "cluster.accelerator=cpu", "--set", "layout.micro_batch_sequences=4"]
    where = ["--hostfile", hostfile, "--root", f"{HOME}/t5", "--install", WHEELS, "--into", into]
    return ["t5-pretrain", "preflight", *where, "--ship-code", *settings]


def install(offline: Cluster, into: str = ENVIRONMENT, hosts: str = "") -> subprocess.CompletedProcess[str]:
    hostfile = HOSTFILE
    if hosts:
        hostfile = f"{HOME}/some"
        offline.disk("head", hostfile).write_text(hosts, "utf-8")
    return offline.exec("head", command(into, hostfile), timeout=240)


def outcomes(result: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    return {words[0]: (words[1], words[2]) for words in lines if words[0] in NODES}


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {str(path): (each.st_ino, each.st_mtime_ns, each.st_size) for path, each in found.items()}


def test_hosts_reach_nothing_outside_the_cluster(offline: Cluster) -> None:
    for host in offline.hosts:
        routes = offline.exec(host, ["ip", "route"]).stdout.splitlines()
        assert len(routes) == 1
        assert routes[0].startswith("10.77.0.0/24 dev eth0")
        assert "unreachable" in offline.exec(host, ["ip", "route", "get", "192.0.2.1"]).stderr


@pytest.mark.usefixtures("wheelhouse")
def test_a_wheelhouse_is_installed_once_and_the_checks_use_it(offline: Cluster) -> None:
    result = install(offline)
    assert outcomes(result) == dict.fromkeys(NODES, ("installed", ENVIRONMENT)), result.stdout + result.stderr
    assert result.returncode == 1  # because the checks looked into the new environments, which have nothing else
    assert all(f"{node}: '{ENVIRONMENT}/bin/python" in result.stdout for node in NODES)
    assert "No module named 'psutil'" in result.stdout
    for node in NODES:
        shown = offline.exec(node, [f"{ENVIRONMENT}/bin/python", "-c", "import first, second; print(second.VALUE)"])
        assert shown.stdout == "1.0\n", shown.stderr
        assert offline.disk(node, ENVIRONMENT).stat().st_mode & 0o077 == 0
    before = {node: state_of(offline.disk(node, ENVIRONMENT)) for node in NODES}
    again = install(offline)
    assert outcomes(again) == dict.fromkeys(NODES, ("already there", ENVIRONMENT)), again.stdout + again.stderr
    assert {node: state_of(offline.disk(node, ENVIRONMENT)) for node in NODES} == before


def test_a_folder_of_others_stays_and_is_named_while_another_host_is_done(
    offline: Cluster, wheelhouse: Wheelhouse
) -> None:
    done = offline.disk("node1", f"{HOME}/mine")
    done.mkdir()
    (done / MARKER).write_text(json.dumps({"wheelhouse": wheelhouse.digest, "complete": True}))
    place = offline.disk("node0", f"{HOME}/mine")
    (place / "lib").mkdir(parents=True)
    (place / "lib/mine.py").write_text("x = 1\n")
    before = state_of(place)
    result = install(offline, f"{HOME}/mine")
    assert result.returncode == 7
    assert ": 1 of 2; the checks were not started" in result.stderr
    assert outcomes(result)["node0"][0] == "FAILED"
    assert "was not made by this command; it was left as it is" in outcomes(result)["node0"][1]
    assert outcomes(result)["node1"] == ("already there", f"{HOME}/mine")
    assert state_of(place) == before


def test_a_tampered_wheel_is_refused_on_the_host(offline: Cluster, wheelhouse: Wheelhouse) -> None:
    name = next(wheel.name for wheel in wheelhouse.wheels if wheel.name.startswith("second"))
    for node in NODES:  # so that the wheel is sent again
        offline.exec(node, ["rm", "-r", "/var/tmp/t5-pretrain-0/wheels"]).check_returncode()
    path = offline.disk("head", f"{WHEELS}/{name}")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"VALUE = '1.0'", b"VALUE = '6.6'"))
    result = install(offline, f"{HOME}/tampered")
    path.write_bytes(content)
    assert result.returncode == 7
    assert all(f"{name} is damaged: it arrived with sha256" in outcomes(result)[node][1] for node in NODES)
    assert all(
        [*offline.disk(node, f"{HOME}/tampered").iterdir()] == [offline.disk(node, f"{HOME}/tampered/{MARKER}")]
        for node in NODES
    )


@pytest.mark.usefixtures("wheelhouse")
def test_an_install_that_is_killed_half_way_is_not_taken_for_finished(offline: Cluster) -> None:
    into, marker = f"{HOME}/killed", offline.disk("node0", f"{HOME}/killed/{MARKER}")
    offline.disk("head", f"{HOME}/one").write_text("node0 slots=1\n", "utf-8")
    with offline.start("head", command(into, f"{HOME}/one"), subprocess.DEVNULL) as started:
        deadline = time.monotonic() + 400  # only a hang takes as long
        while not offline.disk("node0", f"{into}/pyvenv.cfg").exists():
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (head,) = (one for one in offline.processes("head") if "--install" in one.argv)
        os.kill(head.pid, 9)
    while any("pip" in one.argv or "venv" in one.argv for one in offline.processes("node0")):
        assert time.monotonic() < deadline, "what was installed goes on without its head"
        time.sleep(0.02)
    assert json.loads(marker.read_text())["complete"] is False
    result = install(offline, into, "node0 slots=1\n")
    assert outcomes(result) == {"node0": ("installed", into)}, result.stdout + result.stderr
    assert json.loads(marker.read_text())["complete"] is True
    assert offline.exec("node0", [f"{into}/bin/python", "-c", "import first"]).returncode == 0
