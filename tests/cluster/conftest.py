"""Test clusters that tests share. A test that changes a cluster restores it, or uses a cluster of its own."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.testcluster import Cluster
from tests.support.cluster_runs import ClusterRunner, prepare, weights


@pytest.fixture(scope="session")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all hosts of ``cluster`` share."""
    return tmp_path_factory.mktemp("share")


Make = Callable[[Path], object]


@pytest.fixture(scope="session")
def cluster(share: Path) -> Iterator[Cluster]:
    """A head and four nodes."""
    with Cluster.temporary(f"tests-{os.getpid()}", nodes=4, share=share) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def run_on(cluster: Cluster) -> Callable[..., str]:
    """``run_on(host, *argv)`` runs a program, which must succeed, on a host of ``cluster`` and returns its output."""

    def run_on(host: str, *argv: str) -> str:
        result = cluster.exec(host, list(argv), timeout=60)
        assert result.returncode == 0, f"{argv} on {host}: {result.stderr}"
        return result.stdout

    return run_on


@pytest.fixture(scope="session")
def prepared(made_once: Callable[[str, Make], Path]) -> Path:
    """A root with the text, the tokenizer and the token shards that every run here uses."""
    return made_once("prepared", prepare)


@pytest.fixture(scope="session")
def runner(cluster: Cluster, share: Path, prepared: Path) -> ClusterRunner:
    """``cluster``, with shards in the folder that its hosts share."""
    shutil.copytree(prepared, share, dirs_exist_ok=True)
    return ClusterRunner(cluster, share)


@pytest.fixture(scope="session")
def train(runner: ClusterRunner) -> Callable[[str, str, list[str]], Any]:
    """``train(command, name, options)`` trains a run and returns the digests of its final weights."""

    def train(command: str, name: str, options: list[str]) -> Any:
        started = runner.start(command, name, options)
        ended = started.wait(400)
        assert ended.exit_code == 0, ended.output[-4000:]
        assert "FutureWarning" not in ended.output  # users cannot act on it
        assert not runner.left()
        return weights(started.run_folder)

    return train


@pytest.fixture(scope="session")
def one_host(
    train: Callable[[str, str, list[str]], Any], made_once: Callable[[str, Make], Path]
) -> Callable[..., dict[str, Any]]:
    """``one_host(ranks, batch)``: digests of the final weights of a run on one host, which is trained only once."""

    def one_host(ranks: int, batch: int = 64) -> dict[str, Any]:
        name = f"one-host-{ranks}-{batch}"
        options = [f"--set=cluster.ranks={ranks}", f"--set=optimizer.global_batch_sequences={batch}"]
        made = made_once(name, lambda path: path.write_text(json.dumps(train("train", name, options))))
        digests: dict[str, Any] = json.loads(made.read_text())
        return digests

    return one_host
