"""Metrics, the witness and similar files are collected from the node that writes them, and given to its successor."""

from infra.head.storage.gather import collect
from infra.head.storage.provisioning import restore
from infra.node.node_folders import run_path
from infra.node.storage.pull import listed
from tests.support.simulated_nodes import RUN, Site

NAMES = ["metrics.jsonl", "tensorboard", "witness"]


def test_files_and_folders_are_collected_and_a_grown_file_is_copied_again(site: Site) -> None:
    on_node, on_head = site.scratch("a") / run_path(RUN), site.checkpoints.parent
    (on_node / "tensorboard").mkdir(parents=True)
    (on_node / "tensorboard" / "events").write_bytes(b"events")
    for content in (b"one\n", b"one\ntwo\n"):
        (on_node / "metrics.jsonl").write_bytes(content)
        assert collect(site.nodes, "a", run_path(RUN), NAMES, on_head) == ["metrics.jsonl", "tensorboard/events"]
        assert (on_head / "metrics.jsonl").read_bytes() == content
    assert (on_head / "tensorboard" / "events").read_bytes() == b"events"


def test_a_node_that_replaces_another_receives_its_results(site: Site) -> None:
    on_head = site.checkpoints.parent
    (on_head / "metrics.jsonl").write_bytes(b"one\n")
    restore(site.nodes, RUN, run_path(RUN), {"b": listed(on_head, NAMES)}, on_head)
    assert (site.scratch("b") / run_path(RUN) / "metrics.jsonl").read_bytes() == b"one\n"
