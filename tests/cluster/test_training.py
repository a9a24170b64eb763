"""Training on several hosts ends with the weights of one host with as many ranks, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.testcluster.host_files import HOME, HOSTFILE
from t5train.release.verification import verify
from tests.support.cluster_runs import Stage, weights

pytestmark = pytest.mark.cluster

Train = Callable[..., Any]
LAYOUTS = {
    "two-hosts": (2, ["--hostfile", HOSTFILE, "--num-nodes", "2"]),
    "four-hosts": (4, ["--hostfile", HOSTFILE]),
    "two-hosts-of-two": (4, ["--hostfile", f"{HOME}/two-slots", "--include", "node1@node2"]),
}


@pytest.fixture(scope="module")
def train(stage: Stage) -> Train:
    """Digests of the weights with which a run ends."""

    def train(command: str, name: str, options: list[str]) -> Any:
        started = stage.start(command, name, options)
        ended = started.wait(240)
        assert ended.exit_code == 0, ended.output[-4000:]
        assert "FutureWarning" not in ended.output  # which a user can do nothing about
        assert not stage.processes()
        return weights(started.run_folder)

    return train


@pytest.fixture(scope="module")
def one_host(train: Train) -> dict[int, Any]:
    """Digests of the weights with which one host with two and four ranks ends."""
    return {ranks: train("train", f"one-host-{ranks}", ["--set", f"cluster.ranks={ranks}"]) for ranks in (2, 4)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hosts_train_what_one_host_trains(layout: str, stage: Stage, train: Train, one_host: dict[int, Any]) -> None:
    ranks, options = LAYOUTS[layout]
    stage.cluster.disk("head", f"{HOME}/two-slots").write_text(stage.cluster.hostfile(slots=2))
    command = "run" if layout == "two-hosts" else "train"  # `run` goes through Prefect
    assert train(command, layout, options) == one_host[ranks]
    if command == "run":
        verify(str(stage.root / "published" / layout))
