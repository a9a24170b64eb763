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
from infra.testcluster.host_files import HOME, HOSTFILE, OPERATORS
from t5train.errors import TestClusterError

pytestmark = pytest.mark.cluster

RunOn = Callable[..., str]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
IMPATIENT_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1"]
"""For hosts that cannot be reached."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def remains_of(name: str) -> list[object]:
    """Processes, mounts and folders of a cluster that still exist."""
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"t5-testcluster/{name}" in line]
    folders = [path for path in (registry.FOLDER / name,) if path.exists()]
    return [*processes.find(processes.in_run(registry.mark(name)[RUN_ID_VARIABLE])), *mounts, *folders]


def test_each_host_has_a_name_ids_and_a_disk_of_its_own(cluster: Cluster, run_on: RunOn) -> None:
    for command in (["hostname"], ["cat", BOOT_ID], ["cat", "/etc/machine-id"]):
        assert len({run_on(host, *command) for host in cluster.hosts} | {Path(BOOT_ID).read_text()}) == 6
    for folder in ("/tmp", "/var/tmp", HOME, "/run", "/dev/shm"):
        run_on("node0", "touch", f"{folder}/testcluster-mine")
        assert cluster.exec("node1", ["test", "-e", f"{folder}/testcluster-mine"]).returncode == 1
        assert not Path(folder, "testcluster-mine").exists()
    assert cluster.disk("node0", "/tmp/testcluster-mine").exists()


def test_hosts_see_the_machine_read_only_but_can_write_to_the_shared_folder(
    cluster: Cluster, run_on: RunOn, share: Path
) -> None:
    for folder in ("/usr", "/etc", sys.prefix, str(Path(__file__).parent)):
        result = cluster.exec("node0", ["touch", f"{folder}/testcluster-mine"])
        assert "Read-only file system" in result.stderr
    run_on("node0", "touch", str(share / "ours"))
    assert (share / "ours").exists()
    run_on("node1", "rm", str(share / "ours"))


def test_hosts_run_this_python_and_this_code(run_on: RunOn) -> None:
    code = "import sys, infra.testcluster; print(sys.prefix, infra.testcluster.__file__)"
    assert run_on("node1", "python", "-c", code).split() == [sys.prefix, sys.modules["infra.testcluster"].__file__]


def test_each_host_has_its_own_copy_of_compiled_operators_with_the_original_times(
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


def test_the_head_reaches_all_nodes_by_name_and_nodes_reach_no_host_by_ssh(cluster: Cluster, run_on: RunOn) -> None:
    lines = run_on("head", "pdsh", "-R", "ssh", "-w", "node0,node1", "hostname").splitlines()
    assert sorted(lines) == ["node0: node0", "node1: node1"]
    assert (
        "Permission denied" in cluster.exec("node0", [*SSH, "-o", "StrictHostKeyChecking=no", "node1", "true"]).stderr
    )


def test_a_changed_host_key_is_refused_until_the_head_trusts_it(cluster: Cluster, run_on: RunOn) -> None:
    cluster.rekey("node0")
    assert "IDENTIFICATION HAS CHANGED" in cluster.exec("head", [*SSH, "node0", "true"]).stderr
    cluster.rekey("node0", trusted=True)
    run_on("head", *SSH, "node0", "true")


def test_sshd_stops_and_starts(cluster: Cluster, run_on: RunOn) -> None:
    cluster.stop_sshd("node0")
    assert "Connection refused" in cluster.exec("head", [*SSH, "node0", "true"]).stderr
    cluster.start_sshd("node0")
    run_on("head", *SSH, "node0", "true")


def test_a_link_that_is_down_carries_no_traffic(cluster: Cluster, run_on: RunOn) -> None:
    cluster.set_link("node1", "down")
    assert "timed out" in cluster.exec("head", [*IMPATIENT_SSH, "node1", "true"]).stderr
    run_on("head", *SSH, "node0", "true")
    cluster.set_link("node1", "up")
    run_on("head", *SSH, "node1", "true")


def test_a_rate_limited_link_slows_transfers(cluster: Cluster, run_on: RunOn) -> None:
    def seconds() -> float:
        start = time.monotonic()
        run_on("head", *SSH, "node1", "head", "--bytes=10000000", "/dev/zero")
        return time.monotonic() - start

    cluster.set_rate("node1", "10mbit")
    limited = seconds()
    cluster.set_rate("node1", None)
    assert limited > 6  # of 8; both times include the start of ssh
    assert seconds() < limited / 2


def test_only_a_hosts_own_processes_are_shown(cluster: Cluster) -> None:
    sleeper = cluster.start("node0", ["sleep", "1234.5"])
    (found,) = _wait_for(lambda: [p for p in cluster.processes("node0") if p.argv == ("sleep", "1234.5")])
    assert ("sleep", "1234.5") not in [process.argv for process in cluster.processes("node1")]
    os.kill(found.pid, 9)
    assert sleeper.wait(timeout=60) != 0


def test_a_power_cut_leaves_connections_open_and_the_disk_intact(cluster: Cluster, run_on: RunOn) -> None:
    run_on("node1", "touch", f"{HOME}/kept")
    before = run_on("node1", "cat", BOOT_ID)
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
    session.wait(timeout=60)
    cluster.boot("node1")
    run_on("head", *SSH, "node1", "test", "-e", f"{HOME}/kept")
    assert run_on("node1", "cat", BOOT_ID) != before


def test_a_new_disk_is_empty_and_the_host_keeps_its_key(cluster: Cluster, run_on: RunOn) -> None:
    run_on("node1", "touch", f"{HOME}/kept")
    cluster.power_cut("node1")
    cluster.boot("node1", new_disk=True)
    run_on("head", *SSH, "node1", "test", "!", "-e", f"{HOME}/kept")


def test_two_clusters_are_isolated_and_nothing_remains_of_one_after_down(cluster: Cluster, run_on: RunOn) -> None:
    name = f"other-{os.getpid()}"
    with Cluster.temporary(name, nodes=1) as other:
        assert other.address("node0") == cluster.address("node0")
        other.exec("node0", ["touch", "/tmp/other"]).check_returncode()
        other.exec("head", [*SSH, "node0", "test", "-e", "/tmp/other"]).check_returncode()
        run_on("head", *SSH, "node0", "test", "!", "-e", "/tmp/other")
        with pytest.raises(TestClusterError, match="down --name other"):
            Cluster.up(name)
    assert not remains_of(name)
    run_on("head", *SSH, "node0", "true")


def test_a_temporary_cluster_ends_when_its_creator_is_killed() -> None:
    name = f"killed-{os.getpid()}"
    code = f"""
import os
from infra.testcluster import Cluster

Cluster.up({name!r}, nodes=1, temporary=True).start("node0", ["sleep", "1000"])
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    _wait_for(lambda: remains_of(name) == [registry.FOLDER / name])
    with Cluster.temporary(f"next-{os.getpid()}", nodes=1):
        assert not remains_of(name)


def test_the_command_line_creates_inspects_uses_and_removes_a_cluster() -> None:
    name = f"typed-{os.getpid()}"

    def run(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "infra.testcluster", verb, "--name", name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run("up", "--nodes", "1").stdout == "up: head node0\n"
    try:
        assert run("exec", "head", "cat", HOSTFILE).stdout == "node0 slots=1\n"
        assert run("exec", "node0", "sh", "-c", "exit 7").returncode == 7
        assert "sshd" in run("ps", "node0").stdout
        for command in ("sshd node0 stop", "sshd node0 start", "link node0 down", "link node0 up", "rate node0 1gbit"):
            assert run(*command.split()).returncode == 0
        for command in ("rate node0 off", "rekey node0 --trusted", "power-cut node0", "boot node0 --new-disk"):
            assert run(*command.split()).returncode == 0
        assert run("exec", "head", "ssh", "node0", "hostname").stdout == "node0\n"
        refused = run("exec", "node7", "true")
        assert (refused.returncode, refused.stderr) == (7, "error: there is no host 'node7': use one of head node0\n")
    finally:
        down = run("down")
    assert down.returncode == 0
    assert not remains_of(name)


def _wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
