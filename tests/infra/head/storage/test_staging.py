"""A folder is staged to all nodes, each byte over each link once. A transfer that breaks off is continued."""

import io
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.nodes import Nodes
from infra.head.storage.provisioning import stage_folder
from infra.head.storage.staged_bytes import HostBytes, StagedBytes, StagingReports
from infra.node.channel import Channel
from infra.node.messages import encode
from infra.node.ports import Endpoint, free_port
from infra.node.storage import chain_copy, peer_connection
from infra.node.storage.chain_copy import ChainBroken, GrowingFiles, Upstream
from infra.node.storage.file_channel import Chunk, EndOfRange, FileRange, FromReceiver, Wanted, files_in
from infra.node.storage.peer_connection import Introduction
from infra.node.storage.pull import listed
from t5train.errors import HostUnreachable, RemoteFailed, StorageError
from tests.support.simulated_nodes import Site, flip_bit

SHARDS_PATH = "shards/deadbeef"
TOKEN = "ab" * 32
NAMES = ["train.bin", "validation.bin", "manifest.json"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, size in zip(NAMES, (3_000_000, 5_000, 100), strict=True):
        (folder / name).write_bytes(os.urandom(size))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_node_copies_the_folder_from_the_node_before_it(
    make_site: Callable[[str], Site], shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site("abc")
    stage_folder(site.nodes, shards, listed(shards, NAMES), SHARDS_PATH, "smoke")
    assert all(contents(site.scratch(host) / SHARDS_PATH) == contents(shards) for host in "abc")
    assert not caplog.records, "a node did not copy from the node before it"


def test_intact_files_are_not_sent_again_and_damaged_ones_are(site: Site, shards: Path) -> None:
    stage_folder(site.nodes, shards, listed(shards, NAMES), SHARDS_PATH, "smoke")
    on_b = site.scratch("b") / SHARDS_PATH
    kept = (on_b / "validation.bin").stat().st_ino
    content = (on_b / "train.bin").read_bytes()
    flip_bit(on_b / "train.bin")
    (shards / "validation.bin").rename(shards / "not there")
    files = [*listed(shards, ["train.bin"]), *listed(on_b, ["validation.bin"])]
    stage_folder(site.nodes, shards, files, SHARDS_PATH, "x")
    assert (on_b / "train.bin").read_bytes() == content
    assert (on_b / "validation.bin").stat().st_ino == kept


def test_copied_bytes_and_those_that_were_already_there_are_counted_for_each_host(site: Site, shards: Path) -> None:
    staged, files = StagedBytes(), listed(shards, NAMES)
    needed = sum(each.size for each in files)
    stage_folder(site.nodes, shards, files, SHARDS_PATH, "smoke", StagingReports(staged=staged))
    assert staged.by_host() == {host: HostBytes(needed, copied=needed, already_there=0) for host in "ab"}
    on_b = site.scratch("b") / SHARDS_PATH
    (on_b / "train.bin").rename(on_b / ".train.bin.part")
    os.truncate(on_b / ".train.bin.part", 1_000_000)
    staged.begin()
    stage_folder(site.nodes, shards, files, SHARDS_PATH, "smoke", StagingReports(staged=staged))
    on_a, on_b = (staged.by_host()[host] for host in "ab")
    assert on_a == HostBytes(needed, copied=0, already_there=needed)
    assert on_b == HostBytes(needed, copied=2_000_000, already_there=needed - 2_000_000)


def test_a_disk_that_is_too_small_is_reported_before_anything_is_sent(site: Site, shards: Path) -> None:
    with pytest.raises(RemoteFailed, match=r"^a: .*has .* GB free, but shards/deadbeef needs"):
        stage_folder(site.nodes, shards, [Wanted("train.bin", 1 << 50, "0" * 64)], SHARDS_PATH, "smoke")
    assert not (site.scratch("a") / SHARDS_PATH).exists()


def test_staging_reserves_disk_space_for_checkpoints_that_are_not_yet_written(site: Site, shards: Path) -> None:
    files, disk = listed(shards, NAMES), shutil.disk_usage(site.scratch("b")).total
    with pytest.raises(RemoteFailed, match=r"b: .* free, but shards/deadbeef with .* GB for checkpoints needs"):
        stage_folder(site.nodes, shards, files, SHARDS_PATH, "smoke", beside={"b": disk})
    written = site.scratch("b") / "runs/smoke/checkpoints/tag/file"
    written.parent.mkdir(parents=True)
    with open(written, "wb") as file:
        file.truncate(disk)  # a sparse file, which takes no disk space
    stage_folder(site.nodes, shards, files, SHARDS_PATH, "smoke", beside={"b": disk})


def test_a_client_without_the_token_receives_nothing(shards: Path) -> None:
    server = peer_connection.serve(files_in(shards), TOKEN)
    with socket.create_connection((server.address, server.port), timeout=10) as client, client.makefile("rwb") as lines:
        lines.readline()
        for message in (Introduction("00" * 32, "00" * 32), FileRange("manifest.json", 0, 100)):
            lines.write(encode(message))
        lines.flush()
        assert lines.read() == b""


class Dying:
    """A transport on which host ``a`` dies after it has received ``after_bytes`` bytes."""

    def __init__(self, hosts: Any, after_bytes: int) -> None:
        self.hosts, self.after_bytes = hosts, after_bytes

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        inner = self.hosts.command(host, argv)
        return [sys.executable, "-c", DYING, str(self.after_bytes), *inner] if host == "a" else list(inner)


DYING = """
import subprocess, sys
node = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE)
left = int(sys.argv[1])
while left > 0 and (chunk := sys.stdin.buffer.read1(min(left, 65536))):
    node.stdin.write(chunk)
    node.stdin.flush()
    left -= len(chunk)
node.kill()
sys.exit(255)
"""


def test_a_node_that_cannot_reach_the_node_before_it_copies_from_the_head() -> None:
    sent = io.BytesIO()
    head = Channel(io.BytesIO(encode(Chunk(4)) + b"some" + encode(EndOfRange())), sent)
    upstream = chain_copy._Upstream(head, Upstream(Endpoint("127.0.0.1", free_port())), TOKEN)
    assert list(upstream.read("train.bin", 0, 4)) == [b"some"]
    received = Channel(io.BytesIO(sent.getvalue()), io.BytesIO())
    assert isinstance(received.receive(FromReceiver), ChainBroken)
    assert received.receive(FromReceiver) == FileRange("train.bin", 0, 4)


def test_a_node_that_dies_does_not_stop_the_others(site: Site, shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    dying = Nodes(Dying(site.transport, 2_000_000), site.nodes.hosts)
    with pytest.raises(HostUnreachable, match=r"^a: "):
        stage_folder(dying, shards, listed(shards, NAMES), SHARDS_PATH, "smoke")
    assert contents(site.scratch("b") / SHARDS_PATH) == contents(shards)
    assert "b copies from the head" in caplog.text
    part = site.scratch("a") / SHARDS_PATH / ".train.bin.part"
    assert part.stat().st_size > 500_000
    inode = part.stat().st_ino
    stage_folder(site.nodes, shards, listed(shards, NAMES), SHARDS_PATH, "smoke")
    assert contents(site.scratch("a") / SHARDS_PATH) == contents(shards)
    assert part.with_name("train.bin").stat().st_ino == inode, "the transfer did not resume from the partial file"


def test_a_growing_file_can_be_read_and_damaged_data_is_not_passed_on(tmp_path: Path) -> None:
    growing, wanted = GrowingFiles(tmp_path), Wanted("f", 8, "")
    (tmp_path / ".f.part").write_bytes(b"abcd")
    growing.begun(wanted, 4)
    reading = growing.read("f", 1, 8)
    assert next(reading) == b"bcd"
    later = threading.Timer(0.1, lambda: growing.begun(wanted, 0))
    later.start()
    with pytest.raises(StorageError, match="damaged"):
        list(reading)
    later.join()
    (tmp_path / ".f.part").rename(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"ABCDEFGH")
    growing.whole(wanted)
    assert b"".join(growing.read("f", 2, 8)) == b"CDEFGH"
