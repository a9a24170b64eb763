"""Hosts without this package, or with another version, are refused; with the head's code sent to them they train."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_runs import Ended, Stage, Started

from infra.code_bundle import bundle, own_bundle
from infra.node_folder import CODE
from infra.testcluster import Cluster
from infra.testcluster.view import HOME, HOSTFILE

pytestmark = pytest.mark.cluster

SENT = f"/var/tmp/t5-pretrain-0/{CODE}/{own_bundle().digest}"
WHERE = "import infra.guard, pathlib; print(pathlib.Path(infra.guard.__file__).parents[1])"
# Long enough that a head can come back to it.
STEPS = ["--set", "optimizer.num_steps=600", "--set", "storage.checkpoint_every_steps=300"]
SECONDS = 300


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Hosts that share nothing: the first node has no package, the second one with another module."""
    prepared = tmp_path_factory.mktemp("prepared")
    with Cluster.temporary(f"shipped-{os.getpid()}", nodes=2) as cluster:
        stage = Stage(cluster, prepared)
        stage.prepare()
        shutil.copytree(prepared / "shards", cluster.disk("head", f"{HOME}/work/shards"))
        hide("node0", cluster)
        change("node1", cluster)
        yield stage


def found(host: str, cluster: Cluster) -> Path | None:
    """Where a host finds the package; None where it finds none."""
    said = cluster.exec(host, [sys.executable, "-P", "-c", WHERE], timeout=60)
    return Path(said.stdout.strip()) if said.returncode == 0 else None


def hide(host: str, cluster: Cluster) -> None:
    cluster.disk(host, "/run/empty").mkdir()
    while (packages := found(host, cluster)) is not None:
        for name in ("infra", "t5train"):
            cluster.exec(host, ["mount", "--bind", "/run/empty", str(packages / name)]).check_returncode()


def change(host: str, cluster: Cluster) -> None:
    packages = found(host, cluster)
    assert packages is not None
    shutil.copytree(packages / "infra", cluster.disk(host, "/run/infra"))
    (cluster.disk(host, "/run/infra") / "guard.py").write_text("raise SystemExit('the guard that is installed')\n")
    cluster.exec(host, ["mount", "--bind", "/run/infra", str(packages / "infra")]).check_returncode()


def start(stage: Stage, *options: str) -> Started:
    return stage.start("train", "shipped", ["--hostfile", HOSTFILE, *STEPS, *options], root=Path(f"{HOME}/work"))


def t5_pretrain(stage: Stage, *arguments: str) -> tuple[int, str]:
    argv = ["t5-pretrain", *arguments, "--hostfile", HOSTFILE, "--root", f"{HOME}/work", "--ship-code"]
    ended = stage.cluster.exec("head", argv, timeout=SECONDS)
    return ended.returncode, ended.stdout + ended.stderr


def come_back(stage: Stage, started: Started) -> Ended:
    """Kill the head as soon as ranks have taken steps, and start it again."""
    deadline = time.monotonic() + SECONDS
    while not list(stage.cluster.disk("node0", "/var/tmp/t5-pretrain-0/scratch/runs").glob("shipped-*/metrics.jsonl")):
        assert time.monotonic() < deadline, started.log.read_text()
        time.sleep(0.1)
    head = next(one for one in stage.cluster.processes("head") if {"train", "smoke"} <= set(one.argv))
    os.kill(head.pid, signal.SIGKILL)
    started.wait(SECONDS)
    return start(stage, "--ship-code").wait(SECONDS)


def test_hosts_without_the_heads_code_are_told_how_they_can_have_it(stage: Stage) -> None:
    ended = start(stage).wait(SECONDS)
    assert ended.exit_code == 1
    lines = {line.split(": ")[1]: line for line in ended.output.splitlines() if line.startswith("  ") and ": " in line}
    assert "program: " in lines["node0"]
    assert (
        "install the package there, at the same path as here, or have its code sent with --ship-code" in lines["node0"]
    )
    assert "code: " in lines["node1"]
    assert "or have it sent with --ship-code" in lines["node1"]
    assert not any(stage.cluster.disk(host, SENT).exists() for host in ("node0", "node1"))


def test_hosts_train_by_the_code_that_was_sent_also_when_their_head_is_killed_and_comes_back(stage: Stage) -> None:
    ended = come_back(stage, start(stage, "--ship-code"))
    assert ended.exit_code == 0, ended.output[-4000:]
    assert "attempt 1 of shipped is still at work: going on with it" in ended.output
    assert not stage.processes()
    (attempt,) = stage.cluster.disk("head", f"{HOME}/work/runs/shipped/attempts").iterdir()
    assert json.loads((attempt / "attempt.json").read_text())["code"] == own_bundle().digest
    assert (stage.cluster.disk("node0", SENT) / "t5train/train/__pycache__").is_dir()


def test_code_that_was_changed_or_removed_on_a_host_is_sent_again(stage: Stage) -> None:
    changed = stage.cluster.disk("node0", SENT) / "infra/guard.py"
    changed.write_text("raise SystemExit('the guard that somebody changed')\n")
    shutil.rmtree(stage.cluster.disk("node1", SENT))
    code, said = t5_pretrain(stage, "preflight", "smoke", "--set", "cluster.accelerator=cpu")
    assert code == 0, said
    assert "code\tok\tthe head's code" in said
    for host in ("node0", "node1"):
        assert bundle(stage.cluster.disk(host, SENT)) == own_bundle()


def test_code_that_no_attempt_uses_any_more_is_freed(stage: Stage) -> None:
    old = stage.cluster.disk("node1", SENT).with_name("0ld")
    old.mkdir()
    os.utime(old, (0, 0))
    code, said = t5_pretrain(stage, "gc", "--free")
    assert code == 0, said
    assert "node1\tcode/0ld\t" in said
    assert [path.name for path in old.parent.iterdir()] == [own_bundle().digest]
