"""Clusters to test on. What changes one leaves it as it found it, or has one of its own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.testcluster import Cluster
from tests.support.cluster_runs import Stage


@pytest.fixture(scope="session")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all hosts of ``cluster`` have."""
    return tmp_path_factory.mktemp("share")


@pytest.fixture(scope="session")
def cluster(share: Path) -> Iterator[Cluster]:
    """A head and four nodes."""
    with Cluster.temporary(f"tests-{os.getpid()}", nodes=4, share=share) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def on(cluster: Cluster) -> Callable[..., str]:
    """``on(host, *argv)``: what a program that succeeds prints on a host of ``cluster``."""

    def on(host: str, *argv: str) -> str:
        result = cluster.exec(host, list(argv), timeout=60)
        assert result.returncode == 0, f"{argv} on {host}: {result.stderr}"
        return result.stdout

    return on


@pytest.fixture(scope="session")
def stage(cluster: Cluster, share: Path) -> Stage:
    """``cluster``, with shards in the folder that its hosts share."""
    stage = Stage(cluster, share)
    stage.prepare()
    return stage
