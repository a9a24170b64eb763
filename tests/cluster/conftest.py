"""Clusters to test on. What changes one leaves it as it found it, or has one of its own."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infra.testcluster import Cluster
from tests.support.cluster_runs import Stage, prepare, weights


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
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the text, the vocabulary and the token shards that every run here takes."""
    root = tmp_path_factory.mktemp("prepared")
    prepare(root)
    return root


@pytest.fixture(scope="session")
def stage(cluster: Cluster, share: Path, prepared: Path) -> Stage:
    """``cluster``, with shards in the folder that its hosts share."""
    shutil.copytree(prepared, share, dirs_exist_ok=True)
    return Stage(cluster, share)


@pytest.fixture(scope="session")
def train(stage: Stage) -> Callable[[str, str, list[str]], Any]:
    """``train(command, name, options)``: digests of the weights with which a run ends."""

    def train(command: str, name: str, options: list[str]) -> Any:
        started = stage.start(command, name, options)
        ended = started.wait(240)
        assert ended.exit_code == 0, ended.output[-4000:]
        assert "FutureWarning" not in ended.output  # which a user can do nothing about
        assert not stage.processes()
        return weights(started.run_folder)

    return train


@pytest.fixture(scope="session")
def one_host(train: Callable[[str, str, list[str]], Any]) -> Callable[[int], Any]:
    """``one_host(ranks)``: digests of the weights with which one host with that many ranks ends, trained once."""
    return cache(lambda ranks: train("train", f"one-host-{ranks}", ["--set", f"cluster.ranks={ranks}"]))
