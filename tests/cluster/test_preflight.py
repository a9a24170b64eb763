"""``t5-pretrain preflight`` over real ssh names every fault of the hosts and leaves nothing on them."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME, OPERATORS

pytestmark = pytest.mark.cluster

Preflight = Callable[..., subprocess.CompletedProcess[str]]
RunOn = Callable[..., str]
ASKED = f"{HOME}/asked"
"""On the head: the hostfile of a test."""
TWO_NODES = "node0 slots=1\nnode1 slots=1\n"
BUSY_SECONDS = 240  # allows for other tests that run at the same time


@pytest.fixture
def preflight(cluster: Cluster, share: Path) -> Preflight:
    """Run ``t5-pretrain preflight`` on the head, with a hostfile of that text and further arguments."""

    def run(hostfile: str, *arguments: str, root: Path = share) -> subprocess.CompletedProcess[str]:
        path = cluster.disk("head", ASKED)
        path.write_text(hostfile, "utf-8")
        argv = ["t5-pretrain", "preflight", "--hostfile", ASKED, "--root", str(root)]
        settings = ["--set", "cluster.accelerator=cpu", "--set", "layout.micro_batch_sequences=4"]
        return cluster.exec("head", [*argv, *settings, *arguments], timeout=BUSY_SECONDS)

    return run


@pytest.fixture
def broken_route(cluster: Cluster, run_on: RunOn) -> Iterator[None]:
    """The head reaches the second node by ssh, but that node cannot reach the first."""
    route = ("route", "{}", "unreachable", f"{cluster.address('node0')}/32")
    run_on("node1", "ip", *(word.format("add") for word in route))
    yield
    run_on("node1", "ip", *(word.format("del") for word in route))


def rows(result: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Outcome and text of each check; its last line, if it has several."""
    lines = [line.split("\t") for line in result.stdout.splitlines()[1:]]
    return {check: (outcome, what) for check, outcome, what in lines}


def ranks_left(cluster: Cluster) -> list[str]:
    argv = [" ".join(process.argv) for host in ("node0", "node1") for process in cluster.processes(host)]
    return [line for line in argv if "infra.node" in line or "preflight" in line]


def test_hosts_without_a_fault_pass_every_check(cluster: Cluster, preflight: Preflight, share: Path) -> None:
    result = preflight("node0 slots=3\nnode1 slots=1\n")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {outcome for outcome, _ in rows(result).values()} <= {"ok", "note"}
    assert rows(result)["all-reduce"][0] == "ok"
    assert not ranks_left(cluster)
    assert not list(share.glob(".preflight-*"))


def test_every_fault_is_reported_in_one_preflight(cluster: Cluster, preflight: Preflight, run_on: RunOn) -> None:
    lock = f"{OPERATORS}/left_behind/lock"
    run_on("node1", "mkdir", "-p", str(Path(lock).parent))
    run_on("node1", "touch", lock)
    run_on("node1", "mkdir", small := "/var/tmp/small")
    run_on("node1", "mount", "-t", "tmpfs", "-o", "size=1200m,mode=700", "tmpfs", small)
    alias_line = f"{cluster.address('node0')} slots=1\n"
    result = preflight(
        f"{TWO_NODES}nowhere slots=1\n{alias_line}",
        *("--set", "model.preset=11b", "--set", "model.version=v1.1", "--set", f"storage.scratch={small}"),
        root=Path(HOME, "only-on-the-head"),
    )
    run_on("node1", "umount", small)
    found = rows(result)
    assert result.returncode == 1
    assert f"node1: {small} has 1.3 GB free, but the checkpoints and token shards that go there need " in result.stdout
    assert found["reachable"][1].startswith("nowhere: its name does not resolve")
    assert found["machines"][1].startswith(f"node0, {cluster.address('node0')}: these names refer to the same machine")
    assert found["root"][0] == "note"
    assert "share no storage with the head. Files are staged" in found["root"][1]
    assert "but the ranks need" in found["memory"][1]
    assert found["compile locks"] == ("note", f"node1: removed {lock}, left behind by a compile that was killed")
    assert found["all-reduce"][0] == "not tried"


def test_a_host_whose_key_differs_from_known_hosts_is_refused(
    cluster: Cluster, preflight: Preflight, run_on: RunOn
) -> None:
    lines = [line.split(" ", 1) for line in run_on("head", "cat", f"{HOME}/.ssh/known_hosts").splitlines()]
    keys = {names.partition(",")[0]: key for names, key in lines}
    mixed_up = f"node0 {keys['node0']}\nnode1 {keys['node0']}\n"
    cluster.disk("head", f"{HOME}/known").write_text(mixed_up, "utf-8")
    result = preflight(TWO_NODES, "--set", f"cluster.known_hosts={HOME}/known")
    assert result.returncode == 1
    assert rows(result)["host key"][1].startswith("node1: its host key has changed")


@pytest.mark.usefixtures("broken_route")
def test_the_all_reduce_names_a_host_that_cannot_reach_the_first_host(cluster: Cluster, preflight: Preflight) -> None:
    result = preflight(TWO_NODES)
    assert result.returncode == 1
    assert rows(result)["all-reduce"][1].startswith("node1: rank 1: ")
    assert "cannot be reached: No route to host" in rows(result)["all-reduce"][1]
    assert not ranks_left(cluster)


def test_a_run_whose_hosts_fail_preflight_creates_no_files(cluster: Cluster, share: Path) -> None:
    cluster.disk("head", ASKED).write_text(f"{TWO_NODES}nowhere slots=2\n", "utf-8")
    argv = ["t5-pretrain", "run", "smoke", "--hostfile", ASKED, "--root", str(share / "refused")]
    argv += ["--set", "layout.micro_batch_sequences=4"]
    result = cluster.exec("head", argv, timeout=BUSY_SECONDS)
    assert result.returncode == 7
    assert "preflight checks failed" in result.stderr
    assert "reachable: nowhere: its name does not resolve" in result.stderr
    assert not list((share / "refused").iterdir())
