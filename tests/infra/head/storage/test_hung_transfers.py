"""A transfer that hangs delays no lease, because each has a connection of its own."""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.launch import host_session
from infra.head.launch.host_session import HostSession, News
from infra.head.storage.claim import Claim
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.provisioning import restore
from infra.node.attempts import attempt
from infra.node.attempts.head_lease import LEASE
from infra.node.storage.pull import listed
from t5train.errors import HostError
from tests.infra.conftest import Until
from tests.support.simulated_nodes import LocalHosts, Site

RENEWALS = 5
DEAF = """
import array, fcntl, os, sys, termios, time
from pathlib import Path
name, full, ended = sys.argv[1:]
os.read(0, 1 << 16)
os.write(1, name.encode() + b"\\n")
unread = array.array("i", [0])
while unread[0] < 1 << 15:
    fcntl.ioctl(0, termios.FIONREAD, unread)
    time.sleep(0.01)
Path(full).touch()
while not Path(ended).exists():
    time.sleep(0.01)
"""
"""Requests 8 MiB of a file, and reads none of it. ``full`` exists once it arrives, much of it in the pipe."""


class DeafReceiver:
    """Hosts on which whatever receives files stops reading."""

    def __init__(self, hosts: LocalHosts, folder: Path) -> None:
        self.hosts, self.full, self.ended = hosts, folder / "full", folder / "ended"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        if argv[-1] != "receive":
            return self.hosts.command(host, argv)
        request = json.dumps({"FileRange": {"name": "weights", "offset": 0, "size": 8 << 20}})
        return [sys.executable, "-c", DEAF, request, str(self.full), str(self.ended)]


def test_a_host_that_reads_no_more_of_a_transfer_still_gets_the_renewals_of_all_leases(
    site: Site, run: NodeRun, local_hosts: LocalHosts, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_session, "RENEW_SECONDS", 0.0)
    (source := tmp_path / "source").mkdir()
    (source / "weights").write_bytes(bytes(8 << 20))
    hosts, claim = DeafReceiver(local_hosts, tmp_path), Claim()
    run = replace(run, nodes=replace(run.nodes, transport=hosts), owner=replace(run.owner, lease_seconds=0.1))
    this = attempt.begin(tmp_path / "run", None, 60.0, {"a": (0,)})
    local_hosts.prepare(this)
    claim.take(run, run.nodes.hosts, (), adopt=False)
    session = HostSession(hosts, "a", this, {}, News())
    with ThreadPoolExecutor(1) as threads:
        parts = {"a": listed(source, ["weights"])}
        transfer = threads.submit(restore, run.nodes, run.name, run.relative_path, parts, source)
        try:
            until(hosts.full.exists)
            for folder in (local_hosts.attempt_folder("a", this.run_id), site.scratch("a") / run.relative_path):
                for _ in range(RENEWALS):
                    lease, before = folder / LEASE, (folder / LEASE).read_text()
                    until(lambda lease=lease, before=before: lease.read_text() != before)
            assert not transfer.done()
        finally:
            hosts.ended.touch()
            session.close()
            session.join()
            claim.release()
        with pytest.raises(HostError):
            transfer.result()
