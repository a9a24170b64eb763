"""On hosts that share no storage, checkpoints are gathered to the head, restored to nodes and freed, all by ssh."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import run_path, tag_path
from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE
from t5train.checkpoint import sidecar, tags
from t5train.files.run_folder import tag_of
from tests.support.simulated_nodes import digest, make_sidecar

pytestmark = pytest.mark.cluster

SCRATCH = "/var/tmp/scratch"
PROGRAM = str(Path(sys.executable).with_name("t5-pretrain"))
ON_HEAD = """
import sys
from pathlib import Path
from infra.head.storage.gather import gather
from infra.head.hosts.nodes import Nodes
from infra.node.node_folders import tag_path
from infra.node.storage.pull import listed
from infra.head.storage.provisioning import part; from infra.head.storage.provisioning import restore
from infra.head.storage.provisioning import release; from infra.head.storage.provisioning import stage_folder
from infra.head.storage.checkpoint_inventory import survey
from infra.head.storage.checkpoint_inventory import complete_tags
from infra.head.hosts.ssh import Ssh
from t5train.spec import ClusterSpec

head = Path("/var/tmp/head")
head.mkdir()
nodes = Nodes(Ssh.configured(ClusterSpec(), head), ("node0", "node1"), Path(sys.argv[1]))
(head / "train.bin").write_bytes(bytes(range(256)) * 40_000)
stage_folder(nodes, head, listed(head, ["train.bin"]), "shards/some", "smoke")
tag = complete_tags(survey(nodes, "smoke", head / "checkpoints").found)[0]
gather(nodes, "smoke", tag, head / "checkpoints")
parts = {"node0": part(tag, ["part-0.pt", "part-1.pt"], [0])}
restore(nodes, "smoke", tag_path("smoke", tag.name), parts, head / "checkpoints" / tag.name)
release(nodes, "smoke")
"""


def test_shards_are_staged_to_nodes_and_checkpoints_are_gathered_and_restored(
    cluster: Cluster, run_on: Callable[..., str]
) -> None:
    tag_folder = f"{SCRATCH}/{tag_path('smoke', tag_of(8))}"
    nodes = cluster.nodes[:2]
    for rank, node in enumerate(nodes):
        folder, content = cluster.disk(node, tag_folder), bytes([rank]) * 3_000_000
        folder.mkdir(parents=True)
        (folder / f"part-{rank}.pt").write_bytes(content)
        sidecar.write(folder, make_sidecar(rank, 8, {f"part-{rank}.pt": digest(content)}))
    run_on("head", sys.executable, "-c", ON_HEAD, SCRATCH)
    shards = [cluster.disk(node, f"{SCRATCH}/shards/some/train.bin").read_bytes() for node in nodes]
    assert shards == [bytes(range(256)) * 40_000] * 2
    tags.require_complete(cluster.disk("head", f"/var/tmp/head/checkpoints/{tag_of(8)}"))
    assert (cluster.disk("node0", tag_folder) / "part-1.pt").read_bytes() == bytes([1]) * 3_000_000
    gc = ["gc", "--root", "/var/tmp/head", "--hostfile", HOSTFILE, "--include", "node0@node1"]
    output = run_on("head", PROGRAM, *gc, "--set", f"storage.scratch={SCRATCH}", "--free")
    assert output.splitlines()[-1] == "2 removed", output
    assert not any(cluster.disk(node, f"{SCRATCH}/shards/some").exists() for node in nodes)
    for host, folder in (("head", "/var/tmp/head"), *((node, SCRATCH) for node in nodes)):
        run_on(host, "rm", "-r", folder)


def test_a_run_is_deleted_on_all_its_hosts_over_ssh_or_not_at_all(cluster: Cluster, run_on: Callable[..., str]) -> None:
    root, nodes = "/var/tmp/head", cluster.nodes[:2]
    owner = Owner("1" * 32, "head", root, "2026-01-01", 60.0)
    for host in nodes:
        folder = cluster.disk(host, f"{SCRATCH}/{run_path('mine-f00df00df00d')}")
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "owner.json").write_text(json.dumps(asdict(owner)))
    run = cluster.disk("head", f"{root}/runs/mine")
    run.mkdir(parents=True)
    spec = {"storage": {"scratch": SCRATCH}, "cluster": {"hostfile": HOSTFILE, "include": "node0@node1"}}
    begun = {"fingerprint": "f00d" * 16, "unique_id": owner.unique_id, "spec": spec}
    (run / "run.json").write_text(json.dumps(begun))
    rm = [PROGRAM, "rm", "mine", "--root", root, "--yes"]
    cluster.stop_sshd("node1")
    refused = cluster.exec("head", rm, timeout=60)
    cluster.start_sshd("node1")
    assert (refused.returncode, run.exists()) == (7, True)
    assert "run 'mine' is not deleted, because node1 did not answer" in refused.stderr
    left = [cluster.disk(host, f"{SCRATCH}/runs/mine-f00df00df00d") for host in nodes]
    assert all(folder.exists() for folder in left)
    output = run_on("head", *rm)
    assert output.endswith(f"deleted: {root}/runs/mine\n"), output
    assert not any(folder.exists() for folder in (run, *left))
    for host, folder in (("head", root), *((node, SCRATCH) for node in nodes)):
        run_on(host, "rm", "-r", folder)
