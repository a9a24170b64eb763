"""Hosts that share only the network: each gets the files that it reads, and the demonstration publishes a model."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.testcluster import Cluster
from infra.testcluster.__main__ import run_demo
from infra.testcluster.host_files import HOME, ROOT
from t5train.release.certificate import CERTIFICATE, Certificate
from t5train.release.verification import verify
from tests.support.cluster_runs import SETTINGS, weights
from tests.support.rolled_back_runs import FIRST, UnsharedRun

pytestmark = pytest.mark.cluster

VARIANTS: dict[str, dict[str, Any]] = {
    "moe": {
        "model.version": "v1.0",
        "model.moe.num_experts": 4,
        "layout.zero_stage": 2,
        "layout.expert_parallel_size": 2,
        "layout.micro_batch_sequences": 8,
    },
    "pipeline": {"layout.pipeline_stages": 2, "layout.micro_batch_sequences": 8},
}
"""Layouts in which some files are written on one node and read on both."""


@pytest.fixture(scope="module")
def unshared(prepared: Path) -> Iterator[Cluster]:
    """A head and two nodes that share nothing, with token shards on the head."""
    with Cluster.temporary(f"restored-{os.getpid()}", nodes=2) as cluster:
        shutil.copytree(prepared / "shards", cluster.disk("head", f"{ROOT}/shards"))
        cluster.disk("head", f"{HOME}/two-slots").write_text(cluster.hostfile(slots=2))
        yield cluster


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_written_on_one_node_are_restored_to_every_node_that_reads_them(
    unshared: Cluster, variant: str, tmp_path: Path
) -> None:
    run = UnsharedRun(unshared, tmp_path, variant, **VARIANTS[variant])
    hosts = ["--hostfile", f"{HOME}/two-slots"]
    first = run.train(hosts)
    assert first.exit_code == 0, first.output[-4000:]
    expected = weights(run.folder)
    run.roll_back(["node0"])
    run.wipe("node1")
    again = run.train(hosts)
    assert again.exit_code == 0, again.output[-4000:]
    assert run.resumed_from() == [None, FIRST]
    assert weights(run.folder) == expected


def test_the_demonstration_ends_with_a_certified_publication(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_demo(tmp_path, [part for item in SETTINGS.items() for part in ("--set", "{}={}".format(*item))])
    published = tmp_path / "published/demo-cluster"
    assert capfd.readouterr().out.splitlines()[-1] == f"published: {published}"
    verify(str(published))
    assert Certificate.parse((published / CERTIFICATE).read_bytes(), "it").passed
