"""Training on several hosts is bit-identical to training on one host with the same number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.testcluster.host_files import HOME, HOSTFILE
from t5train.release.verification import verify
from tests.support.cluster_runs import ClusterRunner

pytestmark = pytest.mark.cluster

Train = Callable[[str, str, list[str]], Any]
LAYOUTS = {
    "two-hosts": (2, ["--hostfile", HOSTFILE, "--num-nodes", "2"]),
    "four-hosts": (4, ["--hostfile", HOSTFILE]),
    "two-hosts-of-two": (4, ["--hostfile", f"{HOME}/two-slots", "--include", "node1@node2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_hosts_train_the_same_weights_as_one_host(
    layout: str, runner: ClusterRunner, train: Train, one_host: Callable[[int], Any]
) -> None:
    ranks, options = LAYOUTS[layout]
    runner.cluster.disk("head", f"{HOME}/two-slots").write_text(runner.cluster.hostfile(slots=2))
    command = "run" if layout == "two-hosts" else "train"  # `run` goes through Prefect
    assert train(command, layout, options) == one_host(ranks)
    if command == "run":
        verify(str(runner.root / "published" / layout))
