from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.hostfile import Host, Hosts
from infra.head.storage.node_paths import NodeRun
from infra.node.attempts.run_ownership import Owner
from t5train.spec import StorageSpec
from tests.infra.node_store.conftest import RUN, Site

OWNER = Owner("1" * 32, "this-head", "/this/root", "2026-01-01T00:00:00", lease_seconds=60.0)


@pytest.fixture
def site(tmp_path: Path, local_hosts: Any) -> Site:
    """Two nodes, each with a rank of the run."""
    return Site(tmp_path, local_hosts, "ab")


@pytest.fixture
def run(site: Site) -> NodeRun:
    """The run, of which a checkpoint is kept."""
    hosts = Hosts(tuple(Host(name, (0,)) for name in site.nodes.hosts))
    nodes = replace(site.nodes, owner=OWNER.unique_id)
    return NodeRun(RUN, site.checkpoints.parent, hosts, nodes, StorageSpec(keep_last=1), OWNER)
