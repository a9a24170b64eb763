"""What hangs delays no lease: each transfer has a connection of its own, and the disk of a run a thread of its own."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.hosts import agents
from infra.head.hosts.agents import Agents, News
from infra.head.storage.claim import Claim
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.provisioning import restore
from infra.node.attempts import attempt
from infra.node.attempts.head_lease import LEASE
from infra.node.attempts.run_ownership import OWNER
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
    monkeypatch.setattr(agents, "RENEW_SECONDS", 0.0)
    (source := tmp_path / "source").mkdir()
    (source / "weights").write_bytes(bytes(8 << 20))
    hosts, opened = DeafReceiver(local_hosts, tmp_path), Agents()
    run = replace(run, nodes=replace(run.nodes, transport=hosts))
    this = attempt.begin(tmp_path / "run", None, 60.0, {"a": (0,)})
    local_hosts.prepare(this)
    Claim(opened).take(run, run.nodes.hosts, (), adopt=False)
    opened.on(run.nodes, 60.0)["a"].watch(this.run_id, {}, News())
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
            opened.close()
        with pytest.raises(HostError):
            transfer.result()


@contextmanager
def hanging(file: Path, until: Until) -> Iterator[None]:
    """Whoever reads the file next waits until the block ends. It begins when somebody does."""
    os.mkfifo(pipe := file.with_name("pipe"))
    pipe.replace(file)
    opened = list[int]()

    def is_read() -> bool:
        with suppress(OSError):  # nobody reads it yet
            opened.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    until(is_read)
    try:
        yield
    finally:
        os.close(opened[0])


def test_a_disk_of_a_run_that_hangs_delays_no_renewal_for_the_attempt(
    site: Site,
    run: NodeRun,
    local_hosts: LocalHosts,
    tmp_path: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(agents, "RENEW_SECONDS", 0.0)
    monkeypatch.setattr(agents, "_UNANSWERED_SHARE", 0.0)
    opened = Agents()
    claim = Claim(opened)
    this = attempt.begin(tmp_path / "run", None, 60.0, {"a": (0,)})
    local_hosts.prepare(this)
    claim.take(run, run.nodes.hosts, (), adopt=False)
    opened.on(run.nodes, 60.0)["a"].watch(this.run_id, {}, News())
    files, lease = site.scratch("a") / run.relative_path, local_hosts.attempt_folder("a", this.run_id) / LEASE
    with ThreadPoolExecutor(1) as threads, hanging(files / OWNER, until):
        until(lambda: "on a, will retry: no answer for" in caplog.text)
        of_run, released = (files / LEASE).read_text(), threads.submit(claim.release)
        for _ in range(RENEWALS):
            before = lease.read_text()
            until(lambda before=before: lease.read_text() != before)
        assert (files / LEASE).read_text() == of_run
        assert not released.done(), "the host may still renew the claim"
    opened.close()
