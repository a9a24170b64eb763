"""Hosts that share only the network train the same weights as one host, bit for bit, even after disk failures."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.node.node_folders import node_path
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.checkpoint import tags
from t5train.checkpoint.last_complete import last_complete
from t5train.files.run_folder import is_tag
from t5train.records import metrics
from t5train.spec.rank_job import TrainJob
from tests.support.cluster_runs import weights
from tests.support.rolled_back_runs import FIRST, HOSTS, LAST, SCRATCH, SECONDS, UnsharedRun

pytestmark = pytest.mark.cluster

RUN = "unshared"
OPTIMIZER_FILE_OF_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
OPTIMIZER_FILE_OF_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Iterator[UnsharedRun]:
    """A head and three nodes, with token shards on the head."""
    with Cluster.temporary(f"unshared-{os.getpid()}", nodes=3) as cluster:
        shutil.copytree(prepared / "shards", cluster.disk("head", f"{ROOT}/shards"))
        yield UnsharedRun(cluster, tmp_path_factory.mktemp("logs"), RUN)


@pytest.fixture(scope="module")
def one_host_weights(one_host: Callable[[int], Any]) -> Any:
    """Digests of the final weights of a run on one host with two ranks."""
    return one_host(2)


@pytest.fixture(scope="module")
def trained(unshared: UnsharedRun) -> UnsharedRun:
    """The run, after it has completed for the first time."""
    ended = unshared.train()
    assert ended.exit_code == 0, ended.output[-4000:]
    return unshared


def tags_in(folder: Path) -> list[str]:
    """Names of the tags in a folder, without the suffix that distinguishes tags of the same name."""
    names = [path.name.partition(".")[0] for path in folder.glob("*")]
    return sorted(name for name in names if is_tag(name))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_hosts_without_shared_storage_train_the_same_weights_as_one_host(
    trained: UnsharedRun, one_host_weights: Any
) -> None:
    assert weights(trained.folder) == one_host_weights
    assert not trained.cluster.disk("node0", ROOT).exists()
    assert [line["step"] for line in metrics.read(trained.folder / "metrics.jsonl") if "loss" in line] == [
        *range(1, 31)
    ]


def test_checkpoints_are_gathered_whole_and_each_node_keeps_only_its_part(trained: UnsharedRun) -> None:
    for tag in (FIRST, LAST):
        tags.require_complete(trained.folder / "checkpoints" / tag)
    assert not (trained.folder_on("node1") / "checkpoints" / LAST / OPTIMIZER_FILE_OF_0).exists()
    assert not (trained.folder_on("node0") / "checkpoints" / LAST / OPTIMIZER_FILE_OF_1).exists()


def test_another_head_is_refused_the_checkpoints_of_a_run_until_it_adopts_them(
    trained: UnsharedRun, one_host_weights: Any
) -> None:
    other = f"{ROOT}-other"
    shutil.copytree(trained.root / "shards", trained.cluster.disk("head", other) / "shards")
    ended = trained.runner.start("train", RUN, HOSTS, root=Path(other)).wait(SECONDS)
    assert ended.exit_code == 6
    assert re.search(
        rf"on node0, node1 are owned by head \S+, root {ROOT}, since 20.*--adopt.*another --name", ended.message
    )
    assert not trained.cluster.disk("head", f"{other}/runs/{RUN}/attempts").exists(), "an attempt was started"
    adopting = trained.runner.start("train", RUN, [*HOSTS, "--adopt"], root=Path(other)).wait(SECONDS)
    assert adopting.exit_code == 0, adopting.output[-4000:]
    assert re.search(rf"was adopted from head \S+, root {ROOT}, since [0-9: -]+ UTC: {LAST}", adopting.output)
    folder = trained.cluster.disk("head", f"{other}/runs/{RUN}")
    assert TrainJob.read(folder / "attempts/0001/spec.json").resume_tag == LAST
    assert weights(folder) == one_host_weights
    (trained.folder / "manifest.json").unlink()
    back = trained.train()
    assert back.exit_code == 6
    assert f"root {other}, since" in back.message


def test_a_run_resumes_from_an_ungathered_checkpoint_and_replaces_a_node_that_is_lost_twice(
    trained: UnsharedRun, one_host_weights: Any
) -> None:
    written = shutil.copytree(trained.folder_on("node0") / "checkpoints" / LAST, trained.root / "half-written")
    trained.roll_back(["node0", "node1"])
    shutil.move(written, trained.folder_on("node0") / "checkpoints" / LAST)  # without the other node's part
    shutil.rmtree(trained.folder / "checkpoints")
    quick = ["--set", "cluster.lease_seconds=10", "--set", "cluster.grace_seconds=1"]
    adopt = "--adopt"  # in case the other head owns the run
    started = trained.start("run", ["--hostfile", HOSTFILE, "--spares", "1", adopt, *quick])
    attempts = trained.cluster.disk("node1", f"{node_path()}/attempts")
    while not list(attempts.glob("*/rank-00001.pid")):
        assert started.process.poll() is None, started.log.read_text()[-4000:]
        time.sleep(0.1)
    tags.require_complete(trained.folder / "checkpoints" / FIRST)  # gathered before the ranks started
    trained.cluster.power_cut("node1")
    ended = started.wait(SECONDS)
    trained.cluster.boot("node1")
    assert ended.exit_code == 0, ended.output[-4000:]
    assert f"skipping {LAST}: " in ended.output
    assert "node1 has failed twice: node2 takes its place" in ended.output
    assert trained.resumed_from()[-2:] == [FIRST, FIRST]
    assert weights(trained.folder) == one_host_weights


def test_a_run_that_lost_all_checkpoints_restarts_only_on_request_even_if_a_node_is_down(
    trained: UnsharedRun, one_host_weights: Any
) -> None:
    trained.roll_back(["node0", "node1", "node2"])
    shutil.rmtree(trained.folder / "checkpoints")
    trained.wipe("node1")
    trained.wipe("node2")
    ended = trained.train()
    assert ended.exit_code == 10
    assert re.search(rf"{OPTIMIZER_FILE_OF_1} \(last seen [^)]* on [^)]*node2\)", ended.message)
    assert (seen := last_complete(trained.folder)) is not None
    assert seen.tag == LAST
    left = tags_in(trained.folder_on("node0") / "checkpoints")
    aside = trained.cluster.disk("node0", f"{SCRATCH}/set-aside") / trained.folder_on("node0").name
    before = tags_in(aside)  # including the half-written tag of the test above
    trained.cluster.power_cut("node1")  # down from the start, and not needed again after the end
    ended = trained.train(["--hostfile", HOSTFILE, "--spares", "1", "--begin-again"])
    again = trained.train()
    trained.cluster.boot("node1")
    assert ended.exit_code == again.exit_code == 0, ended.output[-4000:] + again.output[-4000:]
    assert "node1 does not answer: node2 takes its place" in ended.output
    assert "node1" not in again.output
    assert trained.resumed_from()[-1] is None
    assert weights(trained.folder) == one_host_weights
    assert left
    assert tags_in(aside) == sorted(before + left)


def test_a_node_that_is_down_at_the_start_a_flipped_bit_and_a_wrong_latest_are_made_good_from_the_gathered_checkpoint(
    trained: UnsharedRun, one_host_weights: Any
) -> None:
    trained.roll_back(["node0"])
    flip_bit(trained.folder_on("node0") / "checkpoints" / FIRST / OPTIMIZER_FILE_OF_0)
    (trained.folder_on("node0") / "checkpoints" / "latest").write_text("step-00000099")
    trained.wipe("node2")
    trained.cluster.power_cut("node1")
    ended = trained.train(["--hostfile", HOSTFILE, "--spares", "1"])
    trained.cluster.boot("node1")
    assert ended.exit_code == 0, ended.output[-4000:]
    assert "node1 does not answer: node2 takes its place" in ended.output
    assert trained.resumed_from()[-1] == FIRST
    assert weights(trained.folder) == one_host_weights
