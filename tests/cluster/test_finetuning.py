"""Fine-tuning on hosts that share only the network: the best checkpoint is kept beside the newest, and never lost.

The run trains adapters of LoRA. So its checkpoints need the start model, which the head copies to the nodes.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.node.node_folders import node_path
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE, ROOT
from t5train.checkpoint import sidecar, tags
from t5train.files.run_folder import CHECKPOINTS
from t5train.records.witness import Witness
from t5train.release.export import export
from t5train.spec.rank_job import TrainJob
from tests.support.cluster_runs import ENVIRONMENT, weights
from tests.support.synthetic_models import SHAPE, make_trained

pytestmark = pytest.mark.cluster

RUN, START = "adapted", f"{ROOT}/start"
BEST, NEXT_TO_LAST, LAST = "step-00000005", "step-00000015", "step-00000020"
SETTINGS: dict[str, Any] = {
    **{f"model.{name}": SHAPE[name] for name in ("d_model", "d_kv", "d_ff")},
    "model.version": "v1.1",
    "model.start_from": START,
    "finetune.lora.rank": 2,
    "optimizer.kind": "adamw",
    "optimizer.num_steps": 20,
    "optimizer.warmup_steps": 5,
    "pairs.input_tokens": 48,
    "pairs.target_tokens": 48,
    # The start's vocabulary lacks most digits: no pair is an exact match, and of equal checkpoints the first is best.
    "shards.max_unknown_share": 1,
    "evaluate.best_metric": "validation_exact_match",
    "storage.validate_every_steps": 5,
    "storage.checkpoint_every_steps": 5,
    "storage.validate_sequences": 16,
    "storage.keep_last": 2,
    "cluster.lease_seconds": 10,
    "cluster.grace_seconds": 1,
}
SECONDS = 400


class Result(NamedTuple):
    """What a run has made on the head."""

    kept: list[str]
    """The gathered checkpoints."""
    newest: dict[str, str]
    """The sha256 of each file of the newest checkpoint."""
    best: Any
    """Digests of the weights of the best checkpoint, which are published."""
    is_published: bool
    resumed_from: str | None


class Hosts:
    """A head and two nodes that share nothing, and a run on them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.root = cluster, cluster.disk("head", ROOT)
        self.folder = self.root / "runs" / RUN

    def finetune(self) -> Result:
        """Run the command to its end."""
        settings = [part for setting in SETTINGS.items() for part in ("--set", "{}={}".format(*setting))]
        options = ("--root", ROOT, "--name", RUN, "--hostfile", HOSTFILE, *settings)
        command = ["t5-pretrain", "finetune", "reverse_and_sort", *options]
        done = self.cluster.exec("head", command, ENVIRONMENT, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        checkpoints = self.folder / CHECKPOINTS
        kept = tags.complete_tags(checkpoints)
        return Result(
            kept,
            {name: each.sha256 for name, each in tags.files_of(sidecar.read_all(checkpoints / kept[0])).items()},
            weights(self.folder),
            (self.root / "published" / RUN / "certificate.json").exists(),
            TrainJob.read(max(self.folder.glob("attempts/*/spec.json"))).resume_tag,
        )

    def on_node(self, node: str) -> Path:
        """The checkpoints on a node's own disk."""
        (found,) = self.cluster.disk(node, f"{node_path()}/scratch/runs").glob(f"{RUN}-*/{CHECKPOINTS}")
        return found

    def interrupt(self) -> None:
        """Make the run look as if it had ended before its last checkpoint, and remove what was made from it."""
        for folder in (self.folder / CHECKPOINTS, *map(self.on_node, ("node0", "node1"))):
            shutil.rmtree(folder / LAST)
        for made in (self.folder / "weights", self.folder / "export", self.folder / "witness", self.root / "published"):
            shutil.rmtree(made)
        (self.folder / "manifest.json").unlink()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = tmp_path_factory.mktemp("made")
    exported = export(*make_trained(made, "pairs"), made / "export")
    with Cluster.temporary(f"finetuning-{os.getpid()}", nodes=2) as cluster:
        shutil.copytree(exported.path, cluster.disk("head", START))
        yield Hosts(cluster)


@pytest.fixture(scope="module")
def undisturbed(hosts: Hosts) -> Result:
    return hosts.finetune()


def test_the_best_checkpoint_is_kept_beside_the_newest_on_nodes_and_head_and_published(
    hosts: Hosts, undisturbed: Result
) -> None:
    assert undisturbed.kept == [LAST, NEXT_TO_LAST, BEST]
    for node in ("node0", "node1"):
        assert {path.name for path in hosts.on_node(node).glob("step-*")} >= {BEST, LAST}
    assert undisturbed.best == Witness.load(hosts.folder / CHECKPOINTS / BEST).model_dump(mode="json")["tensors"]
    assert undisturbed.is_published


def test_a_run_whose_checkpoints_are_only_on_nodes_resumes_bit_equal_with_the_best_one(
    hosts: Hosts, undisturbed: Result
) -> None:
    hosts.interrupt()
    shutil.rmtree(hosts.folder / CHECKPOINTS)
    assert hosts.finetune() == undisturbed._replace(resumed_from=NEXT_TO_LAST)


def test_a_node_whose_disk_was_replaced_resumes_bit_equal_with_the_best_one(hosts: Hosts, undisturbed: Result) -> None:
    hosts.interrupt()
    hosts.cluster.power_cut("node1")
    hosts.cluster.boot("node1", new_disk=True)
    assert hosts.finetune() == undisturbed._replace(resumed_from=NEXT_TO_LAST)
