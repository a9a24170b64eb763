"""Two nights of the regression on hosts that share nothing: what they train and compare, and which of them is kept."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
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
OPTIONS = ["--root", ROOT, "--hostfile", HOSTFILE, "--case", "hosts", "--keep-nights", "1"]


class AfterNight(NamedTuple):
    """What a night has printed, and what was where when it had ended."""

    done: subprocess.CompletedProcess[str]
    nights: list[Path]
    """Folders of nights on the head."""
    runs: dict[str, set[str]]
    """The runs that each node has, without their fingerprints."""
    attempts: dict[str, list[Path]]
    """Folders of attempts that each node has."""


def night_on(cluster: Cluster) -> AfterNight:
    command = [sys.executable, "-c", NIGHT, "regression", "run", *OPTIONS]
    done = cluster.exec("head", command, ENVIRONMENT, timeout=SECONDS)
    folders = {node: cluster.disk(node, ON_NODES) for node in cluster.nodes}
    return AfterNight(
        done,
        RegressionFolder(cluster.disk("head", ROOT)).nights(),
        {node: {path.name[:-13] for path in folder.glob("scratch/runs/*")} for node, folder in folders.items()},
        {node: list(folder.glob("attempts/*")) for node, folder in folders.items()},
    )


def runs_of(night: Path) -> set[str]:
    return {f"hosts-{number}-{night.name}" for number in ("1", "resumed")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes that share nothing."""
    with Cluster.temporary(f"nightly-{os.getpid()}", nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def nights(cluster: Cluster) -> list[AfterNight]:
    """Two nights, of which one is kept."""
    return [night_on(cluster), night_on(cluster)]


def test_a_night_trains_on_the_disks_of_both_hosts_and_the_next_compares_with_it(
    cluster: Cluster, nights: list[AfterNight]
) -> None:
    first, second = nights
    assert "hosts\tlosses, resume, certificate\t\t\t\t\tok\n" in first.done.stdout, (
        first.done.stdout + first.done.stderr
    )
    assert "hosts: no baseline for this machine: recorded\n" in first.done.stdout
    assert "hosts\tlosses, resume, certificate\t\t\t\t\tok\n" in second.done.stdout, second.done.stdout
    assert re.search(r"\nhosts\thost memory\t[^\t]+ MB\t[^\t]+ MB\t", second.done.stdout), second.done.stdout
    [folder] = second.nights
    night = NightResult.read(folder)
    assert [(each.case, each.machine["hosts"], each.problems) for each in night.results] == [
        ("hosts", "node0:1 node1:1", [])
    ]
    assert not [finding for finding in night.findings if finding.about != "time"]
    jobs = [TrainJob.read(path) for path in folder.glob("runs/*/attempts/*/spec.json")]
    assert [job.node_local for job in jobs] == [True, True]
    assert not any(cluster.disk(node, ROOT).exists() for node in cluster.nodes)


def test_the_newest_night_is_kept_and_the_one_before_is_removed_on_the_head_and_on_hosts(
    cluster: Cluster, nights: list[AfterNight]
) -> None:
    first, second = nights
    ([old], [new]) = first.nights, second.nights
    assert old.name < new.name
    assert first.runs == dict.fromkeys(cluster.nodes, runs_of(old))
    assert second.runs == dict.fromkeys(cluster.nodes, runs_of(new))
    assert not any([*first.attempts.values(), *second.attempts.values()])
    assert {path.name for path in (new / "runs").iterdir()} == runs_of(new)
