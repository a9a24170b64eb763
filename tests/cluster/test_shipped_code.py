"""Hosts without this package or with another version are refused. With the head's code shipped to them, they train."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt
from infra.node.code_bundle import bundle, own_bundle
from infra.node.node_folders import CODE
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from tests.support.cluster_runs import ClusterRunner, Started

pytestmark = pytest.mark.cluster

SHIPPED_CODE = f"/var/tmp/t5-pretrain-0/{CODE}/{own_bundle().digest}"
PRINT_PACKAGE_FOLDER = "import infra, pathlib; print(pathlib.Path(infra.__file__).parents[1])"
# Long enough for the head to be killed and started again while the run trains.
LONG = ["--set", "optimizer.num_steps=100000", "--set", "storage.checkpoint_every_steps=100000"]
SECONDS = 300


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Iterator[ClusterRunner]:
    """Hosts that share no storage. The first node lacks the package; the second has one with a changed module."""
    with Cluster.temporary(f"shipped-{os.getpid()}", nodes=2) as cluster:
        runner = ClusterRunner(cluster, tmp_path_factory.mktemp("logs"))
        shutil.copytree(prepared / "shards", cluster.disk("head", f"{ROOT}/shards"))
        hide_packages("node0", cluster)
        change_package("node1", cluster)
        yield runner


def package_folder(host: str, cluster: Cluster) -> Path | None:
    """The folder in which a host finds the package, or None."""
    result = cluster.exec(host, [sys.executable, "-P", "-c", PRINT_PACKAGE_FOLDER], timeout=60)
    return Path(result.stdout.strip()) if result.returncode == 0 else None


def hide_packages(host: str, cluster: Cluster) -> None:
    cluster.disk(host, "/run/empty").mkdir()
    while (packages := package_folder(host, cluster)) is not None:
        for name in ("infra", "t5train"):
            cluster.exec(host, ["mount", "--bind", "/run/empty", str(packages / name)]).check_returncode()


def change_package(host: str, cluster: Cluster) -> None:
    packages = package_folder(host, cluster)
    assert packages is not None
    shutil.copytree(packages / "infra", cluster.disk(host, "/run/infra"))
    guard = cluster.disk(host, "/run/infra/node/attempts/process_guard.py")
    guard.write_text("raise SystemExit('the guard that is installed')\n")
    cluster.exec(host, ["mount", "--bind", "/run/infra", str(packages / "infra")]).check_returncode()


def start(runner: ClusterRunner, name: str, *options: str) -> Started:
    return runner.start("train", name, ["--hostfile", HOSTFILE, *options], root=Path(ROOT))


def attempts(runner: ClusterRunner, name: str) -> list[Attempt]:
    folders = runner.cluster.disk("head", f"{ROOT}/runs/{name}/attempts").iterdir()
    return [attempt.read(folder) for folder in sorted(folders)]


def is_training(runner: ClusterRunner, started: Started) -> bool:
    """Whether rank 0 takes steps. Raises AssertionError if the head has ended."""
    assert started.process.poll() is None, started.log.read_text()
    beats = runner.cluster.disk("node0", "/var/tmp/t5-pretrain-0/attempts").glob("*/rank-00000.beat")
    return any('"phase": "step"' in beat.read_text() for beat in beats)


def signal_head(runner: ClusterRunner, started: Started, number: int) -> int:
    head = next(one for one in runner.cluster.processes("head") if {"train", "smoke"} <= set(one.argv))
    os.kill(head.pid, number)
    return started.wait(SECONDS).exit_code


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def t5_pretrain(runner: ClusterRunner, *arguments: str) -> tuple[int, str]:
    argv = ["t5-pretrain", *arguments, "--hostfile", HOSTFILE, "--root", ROOT, "--ship-code"]
    ended = runner.cluster.exec("head", argv, timeout=SECONDS)
    return ended.returncode, ended.stdout + ended.stderr


def test_hosts_without_the_heads_code_are_refused_and_ship_code_is_suggested(runner: ClusterRunner) -> None:
    ended = start(runner, "refused").wait(SECONDS)
    assert ended.exit_code == 7
    lines = {line.split(": ")[1]: line for line in ended.output.splitlines() if line.startswith("  ") and ": " in line}
    assert "program: " in lines["node0"]
    assert (
        "Install this package there, at the same path as here, or have its code sent with --ship-code" in lines["node0"]
    )
    assert "code: " in lines["node1"]
    assert "or have it sent with --ship-code" in lines["node1"]
    assert not any(runner.cluster.disk(host, SHIPPED_CODE).exists() for host in ("node0", "node1"))


def test_hosts_train_with_the_shipped_code_which_a_restarted_head_continues(runner: ClusterRunner) -> None:
    first = start(runner, "attached", "--ship-code", *LONG)
    until(lambda: is_training(runner, first))
    signal_head(runner, first, signal.SIGKILL)
    metrics = runner.cluster.disk("head", f"{ROOT}/runs/attached/metrics.jsonl")
    known_size = metrics.stat().st_size if metrics.exists() else 0
    second = start(runner, "attached", "--ship-code", *LONG)
    until(lambda: "attempt 1 of attached is still running; continuing it" in second.log.read_text())
    until(lambda: metrics.exists() and metrics.stat().st_size > known_size)  # it collects the ranks' metrics
    assert signal_head(runner, second, signal.SIGTERM) == 128 + signal.SIGTERM
    assert "and saved it" in second.log.read_text("utf-8")
    assert not runner.left()
    assert [each.code for each in attempts(runner, "attached")] == [own_bundle().digest]
    assert (runner.cluster.disk("node0", SHIPPED_CODE) / "t5train/train/__pycache__").is_dir()


def test_code_that_was_changed_or_removed_on_a_host_is_shipped_again(runner: ClusterRunner) -> None:
    changed = runner.cluster.disk("node0", SHIPPED_CODE) / "infra/node/attempts/process_guard.py"
    changed.write_text("raise SystemExit('the guard that somebody changed')\n")
    shutil.rmtree(runner.cluster.disk("node1", SHIPPED_CODE))
    code, output = t5_pretrain(runner, "preflight", "smoke", "--set", "cluster.accelerator=cpu")
    assert code == 0, output
    assert "code\tok\tthe same code as the head" in output
    for host in ("node0", "node1"):
        assert bundle(runner.cluster.disk(host, SHIPPED_CODE)) == own_bundle()


def test_shipped_code_that_no_attempt_uses_any_more_is_freed(runner: ClusterRunner) -> None:
    old = runner.cluster.disk("node1", SHIPPED_CODE).with_name("0ld")
    old.mkdir()
    os.utime(old, (0, 0))
    code, output = t5_pretrain(runner, "gc", "--free")
    assert code == 0, output
    assert "node1\tcode/0ld\t" in output
    assert [path.name for path in old.parent.iterdir()] == [own_bundle().digest]
