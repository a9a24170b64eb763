"""Hosts that share only the network: each gets the files that it reads, and the demonstration publishes a model."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.testcluster import Cluster
from infra.testcluster.__main__ import run_demo
from infra.testcluster.host_files import ROOT
from t5train.release.certificate import CERTIFICATE, Certificate
from t5train.release.verification import verify
from tests.support.cluster_runs import SETTINGS, weights
from tests.support.rolled_back_runs import FIRST, UnsharedRun

pytestmark = pytest.mark.cluster

# Every node reads the model states of both stages, and writes those of one.
PIPELINE: dict[str, Any] = {"layout.pipeline_stages": 2}


@pytest.fixture
def pipeline(prepared: Path, tmp_path: Path) -> Iterator[UnsharedRun]:
    """A run on a head and two nodes that share nothing, with token shards on the head."""
    with Cluster.temporary(f"restored-{os.getpid()}", nodes=2) as cluster:
        shutil.copytree(prepared / "shards", cluster.disk("head", f"{ROOT}/shards"))
        yield UnsharedRun(cluster, tmp_path, "pipeline", **PIPELINE)


# For all layouts, also with several ranks a node, tests/t5train/train/test_node_local.py compares the files that a rank
# is given with those that DeepSpeed opens.
def test_files_written_on_one_node_are_restored_to_every_node_that_reads_them(pipeline: UnsharedRun) -> None:
    first = pipeline.train()
    assert first.exit_code == 0, first.output[-4000:]
    expected = weights(pipeline.folder)
    pipeline.roll_back(["node0"])
    pipeline.wipe("node1")
    again = pipeline.train()
    assert again.exit_code == 0, again.output[-4000:]
    assert pipeline.resumed_from() == [None, FIRST]
    assert weights(pipeline.folder) == expected


def test_the_demonstration_ends_with_a_certified_publication(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_demo(tmp_path, [part for item in SETTINGS.items() for part in ("--set", "{}={}".format(*item))])
    published = tmp_path / "published/demo-cluster"
    assert capfd.readouterr().out.splitlines()[-1] == f"published: {published}"
    verify(str(published))
    assert Certificate.parse((published / CERTIFICATE).read_bytes(), "it").passed
