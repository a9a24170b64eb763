"""Two hosts that share nothing predict a file. One is cut off half-way, and the file is that of one machine."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from infra.node.node_folders import node_path
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOME, HOSTFILE
from t5train.inference.predict.predictions import PREDICTION, PREDICTIONS
from t5train.release.export import export
from tests.support.cluster_runs import ClusterRunner
from tests.support.synthetic_models import make_trained
from tests.support.waiting import await_that

pytestmark = pytest.mark.cluster

ROWS = 2000
MODEL, FILE = f"{HOME}/model", f"{HOME}/rows.jsonl"
OPTIONS = ("--device", "cpu", "--max-new-tokens", "8", "--batch-tokens", "100")
SCRATCH = f"{node_path('scratch')}"


class Predicting:
    """A model and rows on the disk of the head, and what the head alone predicts."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        model = export(*make_trained(folder, "pairs"), folder / "exported").path
        shutil.copytree(model, cluster.disk("head", MODEL))
        words = " ".join(topics.values()).split()
        rows = [{"source": " ".join(words[3 * number : 3 * number + 2 + number % 6])} for number in range(ROWS)]
        cluster.disk("head", FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert self.start("alone", ()).wait(120) == 0, self.log("alone")
        self.expected = self.predictions("alone")

    def start(self, out: str, options: tuple[str, ...] = ("--hostfile", HOSTFILE)) -> subprocess.Popen[bytes]:
        """Predict on both hosts, started on the head as a user does."""
        argv = ["t5-pretrain", "predict", MODEL, f"{FILE}#prefix=", "--out", f"{HOME}/{out}", *OPTIONS, *options]
        with open(self.folder / f"{out}.log", "wb") as output:
            return self.cluster.start("head", argv, output.fileno())

    def log(self, out: str) -> str:
        """The output of the command."""
        return (self.folder / f"{out}.log").read_text("utf-8", "replace")

    def parts(self, out: str) -> dict[str, int]:
        """The parts that the head has, with their times of change."""
        found = {path.name: path for path in self.cluster.disk("head", f"{HOME}/{out}").glob("part-*.jsonl")}
        return {name: path.stat().st_mtime_ns for name, path in found.items()}

    def await_parts(self, out: str, least: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait until so many parts are done."""
        await_that(lambda: len(self.parts(out)) >= least or process.poll() is not None)
        assert process.poll() is None, self.log(out)

    def predictions(self, out: str) -> tuple[bytes, bytes]:
        """The predictions, and what is recorded of them."""
        folder = self.cluster.disk("head", f"{HOME}/{out}")
        return (folder / PREDICTIONS).read_bytes(), (folder / PREDICTION).read_bytes()

    def left(self) -> list[str]:
        """Processes that are left on any host."""
        return ClusterRunner(self.cluster, self.folder).left()

    def rows_on(self, node: str) -> list[Path]:
        """Folders of rows that are left on a host."""
        return list(self.cluster.disk(node, SCRATCH).glob("staged/predict-*"))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predicting]:
    with Cluster.temporary(f"predicting-{os.getpid()}", nodes=2) as cluster:
        yield Predicting(cluster, tmp_path_factory.mktemp("predicting"))


def test_a_host_is_cut_off_half_way_and_the_file_is_that_of_one_machine(predicting: Predicting) -> None:
    process = predicting.start("cut")
    predicting.await_parts("cut", 4, process)
    predicting.cluster.power_cut("node1")
    assert process.wait(200) == 0, predicting.log("cut")
    assert predicting.predictions("cut") == predicting.expected
    predicting.cluster.boot("node1")
    assert not predicting.left()
    assert not predicting.rows_on("node0")


def test_a_host_that_is_down_at_the_start_is_named_and_left_out(predicting: Predicting) -> None:
    predicting.cluster.power_cut("node1")
    assert predicting.start("down").wait(200) == 0, predicting.log("down")
    assert predicting.predictions("down") == predicting.expected
    assert re.search("^node1: .*The other hosts predict its parts$", predicting.log("down"), re.MULTILINE)
    predicting.cluster.boot("node1")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_hosts_when_the_head_ends_and_a_rerun_predicts_the_rest(
    predicting: Predicting, signal_number: int
) -> None:
    out = f"ended-by-{signal_number}"
    process = predicting.start(out)
    predicting.await_parts(out, 4, process)
    (head,) = (
        each for each in predicting.cluster.processes("head") if any("t5-pretrain" in word for word in each.argv)
    )
    os.kill(head.pid, signal_number)
    process.wait(30)
    assert not predicting.left()
    assert not predicting.rows_on("node0")
    assert predicting.start(out).wait(200) == 0, predicting.log(out)
    assert " sources were predicted before" in predicting.log(out)
    assert predicting.predictions(out) == predicting.expected
