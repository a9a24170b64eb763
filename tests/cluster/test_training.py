"""Training on several hosts is bit-identical to training on one host with the same number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.testcluster.host_files import HOME, HOSTFILE
from t5train.release.verification import verify
from tests.support.cluster_runs import ClusterRunner

pytestmark = pytest.mark.cluster

Train = Callable[[str, str, list[str]], Any]
UNEVEN_HOSTFILE = f"{HOME}/uneven"


def test_two_hosts_train_and_publish_the_same_weights_as_one_host(
    runner: ClusterRunner, train: Train, one_host: Callable[[int], Any]
) -> None:
    # `run` goes through Prefect.
    final_weights = train("run", "two-hosts", ["--hostfile", HOSTFILE, "--num-nodes", "2"])
    assert final_weights == one_host(2)
    verify(str(runner.root / "published/two-hosts"))


def test_some_hosts_with_different_numbers_of_ranks_train_the_same_weights_as_one_host(
    runner: ClusterRunner, train: Train, one_host: Callable[[int], Any]
) -> None:
    slots = {"node0": 1, "node1": 2, "node2": 1, "node3": 1}
    lines = "".join(f"{node} slots={count}\n" for node, count in slots.items())
    runner.cluster.disk("head", UNEVEN_HOSTFILE).write_text(lines)
    final_weights = train("train", "three-hosts", ["--hostfile", UNEVEN_HOSTFILE, "--include", "node1@node2@node3"])
    assert final_weights == one_host(4)
