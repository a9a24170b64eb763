"""Hosts that share only the network train the same weights as one host, bit for bit, even after disk failures.

One run goes through everything here, as each start of ranks takes long: it completes; another head adopts it, and loses
a node twice; it loses all checkpoints, and begins again.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.node.node_folders import node_path
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import last_complete
from t5train.files.run_folder import is_tag
from t5train.records import metrics
from tests.support.cluster_runs import Ended, weights
from tests.support.rolled_back_runs import FIRST, LAST, SCRATCH, SECONDS, UnsharedRun

pytestmark = pytest.mark.cluster

RUN = "unshared"
OTHER_ROOT = f"{ROOT}-other"
"""The root of another head on the same machine."""
QUICK = ("--set", "cluster.lease_seconds=10", "--set", "cluster.grace_seconds=1")
OPTIMIZER_FILE_OF_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
OPTIMIZER_FILE_OF_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


class Trained(NamedTuple):
    """The run after it has completed for the first time."""

    run: UnsharedRun
    folder: Path
    """A copy of its folder on the head."""
    on_nodes: dict[str, set[str]]
    """The files of the last checkpoint that each node has."""


class Adopted(NamedTuple):
    """The run after another head has adopted it, and has lost a node twice."""

    run: UnsharedRun
    refused: Ended
    """How the other head's command ended that did not adopt the run."""
    was_started: bool
    """Whether that command started an attempt."""
    ended: Ended
    """How the command ended that adopted it."""
    resumed_from: list[str | None]
    weights: Any
    back: Ended
    """How the first head's next command ended."""


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Iterator[UnsharedRun]:
    """A head and three nodes, with token shards on the head."""
    with Cluster.temporary(f"unshared-{os.getpid()}", nodes=3) as cluster:
        for root in (ROOT, OTHER_ROOT):
            shutil.copytree(prepared / "shards", cluster.disk("head", f"{root}/shards"))
        yield UnsharedRun(cluster, tmp_path_factory.mktemp("logs"), RUN)


@pytest.fixture(scope="module")
def one_host_weights(one_host: Callable[[int], Any]) -> Any:
    """Digests of the final weights of a run on one host with two ranks."""
    return one_host(2)


@pytest.fixture(scope="module")
def trained(unshared: UnsharedRun, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    ended = unshared.train()
    assert ended.exit_code == 0, ended.output[-4000:]
    on_nodes = {
        node: {path.name for path in (unshared.folder_on(node) / "checkpoints" / LAST).iterdir()}
        for node in ("node0", "node1")
    }
    folder = tmp_path_factory.mktemp("trained") / RUN
    return Trained(unshared, shutil.copytree(unshared.folder, folder, symlinks=True), on_nodes)


@pytest.fixture(scope="module")
def adopted(trained: Trained) -> Adopted:
    """Let another head adopt the run, whose last checkpoint is half-written, and whose first one is not gathered."""
    first = trained.run
    other = UnsharedRun(first.cluster, first.runner.root, RUN, OTHER_ROOT)
    refused = other.train()
    was_started = (other.folder / "attempts").exists()
    written = shutil.copytree(first.folder_on("node0") / "checkpoints" / LAST, first.root / "half-written")
    first.roll_back(["node0", "node1"])
    shutil.move(written, first.folder_on("node0") / "checkpoints" / LAST)  # without the other node's part
    started = other.start("run", ["--hostfile", HOSTFILE, "--spares", "1", "--adopt", *QUICK])
    attempts = first.cluster.disk("node1", f"{node_path()}/attempts")
    while not list(attempts.glob("*/rank-00001.pid")):
        assert started.process.poll() is None, started.log.read_text()[-4000:]
        time.sleep(0.1)
    tags.require_complete(other.folder / "checkpoints" / FIRST)  # gathered before the ranks started
    first.cluster.power_cut("node1")
    # The rank on the other node still waits for the lost one, and reads its checkpoint only in the next attempt.
    flip_bit(first.folder_on("node0") / "checkpoints" / FIRST / OPTIMIZER_FILE_OF_0)
    (first.folder_on("node0") / "checkpoints" / "latest").write_text("step-00000099")
    ended = started.wait(SECONDS)
    first.cluster.boot("node1")
    assert ended.exit_code == 0, ended.output[-4000:]
    return Adopted(other, refused, was_started, ended, other.resumed_from(), weights(other.folder), first.train())


def tags_in(folder: Path) -> list[str]:
    """Names of the tags in a folder, without the suffix that distinguishes tags of the same name."""
    names = [path.name.partition(".")[0] for path in folder.glob("*")]
    return sorted(name for name in names if is_tag(name))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_hosts_without_shared_storage_train_the_same_weights_as_one_host(
    trained: Trained, one_host_weights: Any
) -> None:
    assert weights(trained.folder) == one_host_weights
    assert not trained.run.cluster.disk("node0", ROOT).exists()
    assert [line["step"] for line in metrics.read(trained.folder / "metrics.jsonl") if "loss" in line] == [
        *range(1, 31)
    ]


def test_checkpoints_are_gathered_whole_and_each_node_keeps_only_its_part(trained: Trained) -> None:
    for tag in (FIRST, LAST):
        tags.require_complete(trained.folder / "checkpoints" / tag)
    optimizer_files = {OPTIMIZER_FILE_OF_0, OPTIMIZER_FILE_OF_1}
    assert trained.on_nodes["node0"] & optimizer_files == {OPTIMIZER_FILE_OF_0}
    assert trained.on_nodes["node1"] & optimizer_files == {OPTIMIZER_FILE_OF_1}


def test_another_head_is_refused_the_checkpoints_of_a_run_until_it_adopts_them(adopted: Adopted) -> None:
    assert adopted.refused.exit_code == 6
    assert re.search(
        rf"on node0, node1 are owned by head \S+, root {ROOT}, since 20.*--adopt.*another --name",
        adopted.refused.message,
    )
    assert not adopted.was_started
    assert re.search(rf"was adopted from head \S+, root {ROOT}, since [0-9: -]+ UTC: {FIRST}", adopted.ended.output)
    assert adopted.back.exit_code == 6
    assert f"root {OTHER_ROOT}, since" in adopted.back.message


def test_a_run_resumes_from_an_ungathered_checkpoint_and_replaces_a_node_that_is_lost_twice(
    adopted: Adopted, one_host_weights: Any
) -> None:
    assert f"skipping {LAST}: " in adopted.ended.output
    assert "node1 has failed twice: node2 takes its place" in adopted.ended.output
    assert adopted.resumed_from == [FIRST, FIRST]
    assert adopted.weights == one_host_weights  # although a bit of node0's part was flipped after the first attempt


def test_a_run_that_lost_all_checkpoints_restarts_only_on_request_even_if_a_node_is_down(
    adopted: Adopted, one_host_weights: Any
) -> None:
    run, cluster = adopted.run, adopted.run.cluster
    run.roll_back(["node0", "node1", "node2"])
    shutil.rmtree(run.folder / "checkpoints")
    run.wipe("node1")
    run.wipe("node2")
    ended = run.train()
    assert ended.exit_code == 10
    assert re.search(rf"{OPTIMIZER_FILE_OF_1} \(last seen [^)]* on [^)]*node2\)", ended.message)
    assert (seen := last_complete(run.folder)) is not None
    assert seen.tag == LAST
    left = tags_in(run.folder_on("node0") / "checkpoints")
    aside = cluster.disk("node0", f"{SCRATCH}/set-aside") / run.folder_on("node0").name
    before = tags_in(aside)  # including the half-written tag
    cluster.power_cut("node1")  # down from the start, and not needed again after the end
    ended = run.train(["--hostfile", HOSTFILE, "--spares", "1", "--begin-again"])
    again = run.train()
    cluster.boot("node1")
    assert ended.exit_code == again.exit_code == 0, ended.output[-4000:] + again.output[-4000:]
    assert "node1 does not answer: node2 takes its place" in ended.output
    assert "node1" not in again.output
    assert run.resumed_from()[-1] is None
    assert weights(run.folder) == one_host_weights
    assert left
    assert tags_in(aside) == sorted(before + left)
