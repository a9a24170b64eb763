"""Training on several hosts is bit-identical to training on one host with the same number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.testcluster.host_files import HOME
from tests.support.cluster_runs import ClusterRunner

pytestmark = pytest.mark.cluster

UNEVEN_HOSTFILE = f"{HOME}/uneven"
RANKS, BATCH = 3, 48


def test_some_hosts_with_different_numbers_of_ranks_train_the_same_weights_as_one_host(
    runner: ClusterRunner, train: Callable[[str, str, list[str]], Any], one_host: Callable[..., Any]
) -> None:
    slots = {"node0": 1, "node1": 2, "node2": 1}
    lines = "".join(f"{node} slots={count}\n" for node, count in slots.items())
    runner.cluster.disk("head", UNEVEN_HOSTFILE).write_text(lines)
    batch = f"--set=optimizer.global_batch_sequences={BATCH}"
    uneven = ["--hostfile", UNEVEN_HOSTFILE, "--include", "node1@node2", batch]
    assert train("train", "two-of-three-hosts", uneven) == one_host(RANKS, BATCH)
