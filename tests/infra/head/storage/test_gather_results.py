"""Metrics, the witness and similar files are collected from the node that writes them, and given to its successor."""

from infra.head.storage.gather import collect
from infra.head.storage.provisioning import restore
from infra.node.node_folders import run_path
from infra.node.storage.pull import listed
from tests.support.simulated_nodes import RUN, Site

NAMES = ["metrics.jsonl", "tensorboard", "witness"]


def test_files_and_folders_are_copied_and_what_has_grown_comes_again(site: Site) -> None:
    there, here = site.scratch("a") / run_path(RUN), site.checkpoints.parent
    (there / "tensorboard").mkdir(parents=True)
    (there / "tensorboard" / "events").write_bytes(b"events")
    for content in (b"one\n", b"one\ntwo\n"):
        (there / "metrics.jsonl").write_bytes(content)
        assert collect(site.nodes, "a", run_path(RUN), NAMES, here) == ["metrics.jsonl", "tensorboard/events"]
        assert (here / "metrics.jsonl").read_bytes() == content
    assert (here / "tensorboard" / "events").read_bytes() == b"events"


def test_a_node_that_takes_another_ones_place_is_given_them(site: Site) -> None:
    here = site.checkpoints.parent
    (here / "metrics.jsonl").write_bytes(b"one\n")
    restore(site.nodes, RUN, run_path(RUN), {"b": listed(here, NAMES)}, here)
    assert (site.scratch("b") / run_path(RUN) / "metrics.jsonl").read_bytes() == b"one\n"
