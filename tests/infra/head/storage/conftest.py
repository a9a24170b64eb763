from dataclasses import replace

import pytest

from infra.head.hosts.hostfile import Host, Hosts
from infra.head.storage.node_paths import NodeRun
from infra.node.attempts.run_ownership import Owner
from t5train.spec import StorageSpec
from tests.support.simulated_nodes import RUN, Site

OWNER = Owner("1" * 32, "this-head", "/this/root", "2026-01-01T00:00:00", lease_seconds=60.0)


@pytest.fixture
def run(site: Site) -> NodeRun:
    """The run, which keeps only its last checkpoint."""
    hosts = Hosts(tuple(Host(name, (0,)) for name in site.nodes.hosts))
    nodes = replace(site.nodes, owner=OWNER.unique_id)
    return NodeRun(RUN, site.checkpoints.parent, hosts, nodes, StorageSpec(keep_last=1), OWNER)
