"""Connects to hosts for commands that work on their files, and sends the code there if asked to."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.head.hosts.code_shipping import ship, shipped_code
from infra.head.hosts.node_client import Nodes
from infra.head.hosts.ssh import Ssh
from t5train.errors import HostError
from t5train.spec import MachinesSpec


@contextmanager
def reached_nodes(machines: MachinesSpec, hosts: Iterable[str]) -> Iterator[tuple[Nodes, dict[str, HostError]]]:
    """Yield those of the hosts that have the code, and the errors of those to which it could not be sent."""
    names, cluster = tuple(hosts), machines.cluster
    with tempfile.TemporaryDirectory(prefix="t5-hosts-") as folder:
        transport, code = Ssh.configured(cluster, Path(folder)), shipped_code(cluster)
        lacking = ship(transport, names) if code else {}
        reached = tuple(host for host in names if host not in lacking)
        yield Nodes(transport, reached, machines.storage.scratch, code), lacking
