"""Two nights of the regression on hosts that share nothing: what the first trains, and that the next removes it.

The next one asks for a host that there is not, so it trains nothing. tests/deployments/test_nightly.py compares nights.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME, HOSTFILE, ROOT
from t5train.regression.night_folders import RegressionFolder
from t5train.regression.night_results import NightResult
from t5train.spec.rank_job import TrainJob
from tests.support.cluster_runs import ENVIRONMENT

pytestmark = pytest.mark.cluster

ON_NODES = "/var/tmp/t5-pretrain-0"
SECONDS = 400
# The command as users start it, but with one repeat. Times are not judged: other tests take turns on the same cores.
NIGHT = """
from dataclasses import replace
from infra.head.regression.night_run import Night
from t5train.regression import regression_cases

on_hosts = regression_cases._on_hosts
regression_cases._on_hosts = lambda *given: replace(on_hosts(*given), repeats=1)
Night._is_slower = lambda *_: False
from flows.cli.__main__ import main

main()
"""
OPTIONS = ["--root", ROOT, "--case", "hosts", "--keep-nights", "1", "--hostfile"]
OTHER_HOSTFILE = f"{HOME}/others"


class AfterNight(NamedTuple):
    """What a night has printed, and what was where when it had ended."""

    done: subprocess.CompletedProcess[str]
    nights: list[Path]
    """Folders of nights on the head."""
    runs: dict[str, set[str]]
    """The runs that each node has, without their fingerprints."""
    attempts: dict[str, list[Path]]
    """Folders of attempts that each node has."""
    result: NightResult
    """What the newest night has recorded."""
    node_local: list[bool]
    """Whether each attempt of the newest night trained on its hosts' own disks."""


def night_on(cluster: Cluster, hostfile: str) -> AfterNight:
    command = [sys.executable, "-c", NIGHT, "regression", "run", *OPTIONS, hostfile]
    done = cluster.exec("head", command, ENVIRONMENT, timeout=SECONDS)
    folders = {node: cluster.disk(node, ON_NODES) for node in cluster.nodes}
    nights = RegressionFolder(cluster.disk("head", ROOT)).nights()
    assert nights, done.stdout + done.stderr
    return AfterNight(
        done,
        nights,
        {node: {path.name[:-13] for path in folder.glob("scratch/runs/*")} for node, folder in folders.items()},
        {node: list(folder.glob("attempts/*")) for node, folder in folders.items()},
        NightResult.read(nights[-1]),
        [TrainJob.read(path).node_local for path in nights[-1].glob("runs/*/attempts/*/spec.json")],
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes that share nothing."""
    with Cluster.temporary(f"nightly-{os.getpid()}", nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def nights(cluster: Cluster) -> list[AfterNight]:
    """Two nights, of which one is kept."""
    cluster.disk("head", OTHER_HOSTFILE).write_text("node9 slots=1\n", "utf-8")
    return [night_on(cluster, HOSTFILE), night_on(cluster, OTHER_HOSTFILE)]


def test_a_night_trains_on_the_disks_of_both_hosts_and_records_its_baseline(
    cluster: Cluster, nights: list[AfterNight]
) -> None:
    first, _ = nights
    assert "hosts\tlosses, resume, certificate\t\t\t\t\tok\n" in first.done.stdout, (
        first.done.stdout + first.done.stderr
    )
    assert "hosts: no baseline for this machine: recorded\n" in first.done.stdout
    night = first.result
    assert [(each.case, each.machine["hosts"], each.problems) for each in night.results] == [
        ("hosts", "node0:1 node1:1", [])
    ]
    assert not night.findings
    assert first.node_local == [True, True]
    assert not any(cluster.disk(node, ROOT).exists() for node in cluster.nodes)


def test_the_newest_night_is_kept_and_the_one_before_is_removed_on_the_head_and_on_hosts(
    cluster: Cluster, nights: list[AfterNight]
) -> None:
    first, second = nights
    ([old], [new]) = first.nights, second.nights
    assert old.name < new.name
    assert [*first.runs.values()] == [{f"hosts-{number}-{old.name}" for number in ("1", "resumed")}] * 2
    assert [*second.runs.values()] == [set(), set()]
    assert not any([*first.attempts.values(), *second.attempts.values()])
    (problem,) = [problem for each in second.result.results for problem in each.problems]
    assert problem.startswith("asking the hosts failed: node9"), problem
