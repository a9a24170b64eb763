"""The test cluster: its hosts share only what they should, and every simulated fault really happens."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.node import processes
from infra.node.processes import RUN_ID_VARIABLE
from infra.testcluster import Cluster, registry
from infra.testcluster.host_files import OPERATORS
from t5train.errors import TestClusterError

pytestmark = pytest.mark.cluster

On = Callable[..., str]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1"]
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def left_of(name: str) -> list[object]:
    """Processes, mounts and folders of a cluster that still exist."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"t5-testcluster/{name}" in line]
    folders = [path for path in (registry.FOLDER / name,) if path.exists()]
    return [*processes.find(processes.in_run(registry.mark(name)[RUN_ID_VARIABLE])), *mounts, *folders]


def test_each_host_has_a_name_ids_and_a_disk_of_its_own(cluster: Cluster, on: On) -> None:
    for command in (["hostname"], ["cat", BOOT_ID], ["cat", "/etc/machine-id"]):
        assert len({on(host, *command) for host in cluster.hosts} | {Path(BOOT_ID).read_text()}) == 6
    for folder in ("/tmp", "/var/tmp", "/root", "/run", "/dev/shm"):
        on("node0", "touch", f"{folder}/testcluster-mine")
        assert cluster.exec("node1", ["test", "-e", f"{folder}/testcluster-mine"]).returncode == 1
        assert not Path(folder, "testcluster-mine").exists()
    assert cluster.disk("node0", "/tmp/testcluster-mine").exists()


def test_the_machine_is_read_only_for_hosts_and_the_shared_folder_is_not(cluster: Cluster, on: On, share: Path) -> None:
    for folder in ("/usr", "/etc", sys.prefix, str(Path(__file__).parent)):
        result = cluster.exec("node0", ["touch", f"{folder}/testcluster-mine"])
        assert "Read-only file system" in result.stderr
    on("node0", "touch", str(share / "ours"))
    assert (share / "ours").exists()
    on("node1", "rm", str(share / "ours"))


def test_hosts_run_this_python_and_this_code(on: On) -> None:
    code = "import sys, infra.testcluster; print(sys.prefix, infra.testcluster.__file__)"
    assert on("node1", "python", "-c", code).split() == [sys.prefix, sys.modules["infra.testcluster"].__file__]


def test_compiled_operators_are_each_hosts_own_and_as_old_as_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = tmp_path / "operators" / "op" / "op.so"
    operator.parent.mkdir(parents=True)
    operator.touch()
    os.utime(operator, (1, 1_000_000_007))
    (operator.parent / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    with Cluster.temporary(f"operators-{os.getpid()}", nodes=1) as cluster:
        assert cluster.exec("node0", ["stat", "--format=%Y", f"{OPERATORS}/op/op.so"]).stdout == "1000000007\n"
        assert cluster.exec("node0", ["ls", f"{OPERATORS}/op"]).stdout == "op.so\n"
        cluster.exec("node0", ["rm", f"{OPERATORS}/op/op.so"]).check_returncode()
    assert operator.exists()


def test_the_head_reaches_all_by_name_and_nodes_reach_nobody(cluster: Cluster, on: On) -> None:
    lines = on("head", "pdsh", "-R", "ssh", "-w", "node0,node1", "hostname").splitlines()
    assert sorted(lines) == ["node0: node0", "node1: node1"]
    assert (
        "Permission denied" in cluster.exec("node0", [*SSH, "-o", "StrictHostKeyChecking=no", "node1", "true"]).stderr
    )


def test_another_host_key_is_refused_until_the_head_is_told(cluster: Cluster, on: On) -> None:
    cluster.rekey("node0")
    assert "IDENTIFICATION HAS CHANGED" in cluster.exec("head", [*SSH, "node0", "true"]).stderr
    cluster.rekey("node0", trusted=True)
    on("head", *SSH, "node0", "true")


def test_sshd_stops_and_starts(cluster: Cluster, on: On) -> None:
    cluster.stop_sshd("node0")
    assert "Connection refused" in cluster.exec("head", [*SSH, "node0", "true"]).stderr
    cluster.start_sshd("node0")
    on("head", *SSH, "node0", "true")


def test_a_cable_that_is_pulled_lets_nothing_through(cluster: Cluster, on: On) -> None:
    cluster.set_link("node1", "down")
    assert "timed out" in cluster.exec("head", [*SSH, "node1", "true"]).stderr
    on("head", *SSH, "node0", "true")
    cluster.set_link("node1", "up")
    on("head", *SSH, "node1", "true")


def test_a_limited_cable_takes_its_time(cluster: Cluster, on: On) -> None:
    def seconds() -> float:
        start = time.monotonic()
        on("head", *SSH, "node1", "head", "--bytes=3000000", "/dev/zero")
        return time.monotonic() - start

    cluster.set_rate("node1", "10mbit")
    assert seconds() > 1.5
    cluster.set_rate("node1", None)
    assert seconds() < 1.5


def test_only_a_hosts_own_processes_are_shown(cluster: Cluster) -> None:
    sleeper = cluster.start("node0", ["sleep", "1234.5"])
    (found,) = _wait_for(lambda: [p for p in cluster.processes("node0") if p.argv == ("sleep", "1234.5")])
    assert ("sleep", "1234.5") not in [process.argv for process in cluster.processes("node1")]
    os.kill(found.pid, 9)
    assert sleeper.wait(timeout=10) != 0


def test_a_power_cut_tells_nobody_and_a_boot_brings_the_disk_back(cluster: Cluster, on: On) -> None:
    on("node1", "touch", "/root/kept")
    before = on("node1", "cat", BOOT_ID)
    session = cluster.start("head", [*SSH, "node1", "sleep", "1000"], output=subprocess.DEVNULL)
    _wait_for(lambda: [p for p in cluster.processes("node1") if p.argv == ("sleep", "1000")])
    cluster.power_cut("node1")
    assert not cluster.processes("node1")
    with pytest.raises(TestClusterError, match="node1 is switched off"):
        cluster.exec("node1", ["true"])
    time.sleep(1)
    assert session.poll() is None
    (client,) = (process for process in cluster.processes("head") if process.argv[0] == "ssh")
    os.kill(client.pid, 9)
    session.wait(timeout=10)
    cluster.boot("node1")
    on("head", *SSH, "node1", "test", "-e", "/root/kept")
    assert on("node1", "cat", BOOT_ID) != before


def test_a_new_disk_is_empty_and_the_host_keeps_its_key(cluster: Cluster, on: On) -> None:
    on("node1", "touch", "/root/kept")
    cluster.power_cut("node1")
    cluster.boot("node1", new_disk=True)
    on("head", *SSH, "node1", "test", "!", "-e", "/root/kept")


def test_two_clusters_do_not_meet_and_nothing_is_left_of_one_that_went_down(cluster: Cluster, on: On) -> None:
    name = f"other-{os.getpid()}"
    with Cluster.temporary(name, nodes=1) as other:
        assert other.address("node0") == cluster.address("node0")
        other.exec("node0", ["touch", "/tmp/other"]).check_returncode()
        other.exec("head", [*SSH, "node0", "test", "-e", "/tmp/other"]).check_returncode()
        on("head", *SSH, "node0", "test", "!", "-e", "/tmp/other")
        with pytest.raises(TestClusterError, match="down --name other"):
            Cluster.up(name)
    assert not left_of(name)
    on("head", *SSH, "node0", "true")


def test_a_cluster_ends_with_a_creator_that_is_killed() -> None:
    name = f"killed-{os.getpid()}"
    code = f"""
import os
from infra.testcluster import Cluster

Cluster.up({name!r}, nodes=1, temporary=True).start("node0", ["sleep", "1000"])
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    _wait_for(lambda: left_of(name) == [registry.FOLDER / name])
    with Cluster.temporary(f"next-{os.getpid()}", nodes=1):
        assert not left_of(name)


def test_the_command_line_makes_shows_uses_and_ends_a_cluster() -> None:
    name = f"typed-{os.getpid()}"

    def run(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "infra.testcluster", verb, "--name", name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run("up", "--nodes", "1").stdout == "up: head node0\n"
    try:
        assert run("exec", "head", "cat", "/root/hosts").stdout == "node0 slots=1\n"
        assert run("exec", "node0", "sh", "-c", "exit 7").returncode == 7
        assert "sshd" in run("ps", "node0").stdout
        for command in ("sshd node0 stop", "sshd node0 start", "link node0 down", "link node0 up", "rate node0 1gbit"):
            assert run(*command.split()).returncode == 0
        for command in ("rate node0 off", "rekey node0 --trusted", "power-cut node0", "boot node0 --new-disk"):
            assert run(*command.split()).returncode == 0
        assert run("exec", "head", "ssh", "node0", "hostname").stdout == "node0\n"
        refused = run("exec", "node7", "true")
        assert (refused.returncode, refused.stderr) == (1, "error: there is no host 'node7': use one of head node0\n")
    finally:
        down = run("down")
    assert down.returncode == 0
    assert not left_of(name)


def _wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
