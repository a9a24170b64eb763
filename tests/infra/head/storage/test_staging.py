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

from infra.head.hosts.node_client import Nodes
from infra.head.storage.provisioning import stage_folder
from infra.node.channel import BrokenOff, Channel
from infra.node.messages import encode
from infra.node.ports import Endpoint, free_port
from infra.node.storage import chain_copy, peer_connection
from infra.node.storage.chain_copy import ChainBroken, GrowingFiles, Upstream
from infra.node.storage.file_channel import Chunk, EndOfRange, FileRange, FromReceiver, Wanted, fetch_over, files_in
from infra.node.storage.peer_connection import Introduction
from infra.node.storage.pull import listed
from t5train.errors import HostUnreachable, RemoteFailed, StorageError
from tests.support.simulated_nodes import Site

PLACE = "shards/deadbeef"
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


def test_every_node_has_the_folder_and_each_took_it_from_the_one_before(
    make_site: Callable[[str], Site], shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site("abc")
    told: list[tuple[int, int | None]] = []
    stage_folder(site.nodes, shards, listed(shards, NAMES), PLACE, "smoke", lambda _, *of: told.append(of))
    assert all(contents(site.scratch(host) / PLACE) == contents(shards) for host in "abc")
    assert not caplog.records, "a node did not take from the one before it"


def test_what_is_there_is_not_sent_again_and_what_is_damaged_is(site: Site, shards: Path) -> None:
    stage_folder(site.nodes, shards, listed(shards, NAMES), PLACE, "smoke")
    there = site.scratch("b") / PLACE
    kept = (there / "validation.bin").stat().st_ino
    content = (there / "train.bin").read_bytes()
    (there / "train.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (shards / "validation.bin").rename(shards / "not there")
    stage_folder(site.nodes, shards, [*listed(shards, ["train.bin"]), *listed(there, ["validation.bin"])], PLACE, "x")
    assert (there / "train.bin").read_bytes() == content
    assert (there / "validation.bin").stat().st_ino == kept


def test_a_disk_that_is_too_small_is_told_before_anything_is_sent(site: Site, shards: Path) -> None:
    with pytest.raises(RemoteFailed, match=r"^a: .*has .* GB free, but shards/deadbeef needs"):
        stage_folder(site.nodes, shards, [Wanted("train.bin", 1 << 50, "0" * 64)], PLACE, "smoke")
    assert not (site.scratch("a") / PLACE).exists()


def test_room_is_kept_for_what_the_run_will_write_beside_and_has_not_written_yet(site: Site, shards: Path) -> None:
    files, disk = listed(shards, NAMES), shutil.disk_usage(site.scratch("b")).total
    with pytest.raises(RemoteFailed, match=r"b: .* free, but shards/deadbeef with .* GB for checkpoints needs"):
        stage_folder(site.nodes, shards, files, PLACE, "smoke", beside={"b": disk})
    written = site.scratch("b") / "runs/smoke/checkpoints/tag/file"
    written.parent.mkdir(parents=True)
    with open(written, "wb") as file:
        file.truncate(disk)  # a sparse file, which takes no disk space
    stage_folder(site.nodes, shards, files, PLACE, "smoke", beside={"b": disk})


def test_who_does_not_know_the_token_gets_nothing(shards: Path) -> None:
    server = peer_connection.serve(files_in(shards), TOKEN)
    with socket.create_connection((server.address, server.port), timeout=10) as liar, liar.makefile("rwb") as lines:
        lines.readline()
        for message in (Introduction("00" * 32, "00" * 32), FileRange("manifest.json", 0, 100)):
            lines.write(encode(message))
        lines.flush()
        assert lines.read() == b""


def test_a_wrong_token_is_told_and_the_right_one_is_served(shards: Path) -> None:
    server = peer_connection.serve(files_in(shards), TOKEN)
    with pytest.raises(BrokenOff, match="token"):
        peer_connection.connect(server, "cd" * 32)
    channel = peer_connection.connect(server, TOKEN)
    assert b"".join(fetch_over(channel)("manifest.json", 10, 100)) == (shards / "manifest.json").read_bytes()[10:]
    channel.close()


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


def test_a_node_that_cannot_reach_the_one_before_it_takes_from_the_head() -> None:
    said = io.BytesIO()
    head = Channel(io.BytesIO(encode(Chunk(4)) + b"some" + encode(EndOfRange())), said)
    upstream = chain_copy._Upstream(head, Upstream(Endpoint("127.0.0.1", free_port())), TOKEN)
    assert list(upstream.read("train.bin", 0, 4)) == [b"some"]
    heard = Channel(io.BytesIO(said.getvalue()), io.BytesIO())
    assert isinstance(heard.receive(FromReceiver), ChainBroken)
    assert heard.receive(FromReceiver) == FileRange("train.bin", 0, 4)


def test_a_node_that_dies_in_the_chain_holds_up_no_other(
    site: Site, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dying = Nodes(Dying(site.transport, 2_000_000), site.nodes.hosts)
    with pytest.raises(HostUnreachable, match=r"^a: "):
        stage_folder(dying, shards, listed(shards, NAMES), PLACE, "smoke")
    assert contents(site.scratch("b") / PLACE) == contents(shards)
    assert "b copies from the head" in caplog.text
    part = site.scratch("a") / PLACE / ".train.bin.part"
    assert part.stat().st_size > 500_000
    inode = part.stat().st_ino
    stage_folder(site.nodes, shards, listed(shards, NAMES), PLACE, "smoke")
    assert contents(site.scratch("a") / PLACE) == contents(shards)
    assert (site.scratch("a") / PLACE / "train.bin").stat().st_ino == inode, "it did not go on where it stood"


def test_what_still_comes_can_be_read_and_what_came_damaged_is_not_passed_on(tmp_path: Path) -> None:
    shelf, wanted = GrowingFiles(tmp_path), Wanted("f", 8, "")
    (tmp_path / ".f.part").write_bytes(b"abcd")
    shelf.begun(wanted, tmp_path / ".f.part", 4)
    reading = shelf.read("f", 1, 8)
    assert next(reading) == b"bcd"
    later = threading.Timer(0.1, lambda: shelf.begun(wanted, tmp_path / ".f.part", 0))
    later.start()
    with pytest.raises(StorageError, match="damaged"):
        list(reading)
    later.join()
    (tmp_path / ".f.part").rename(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"ABCDEFGH")
    shelf.whole(wanted)
    assert b"".join(shelf.read("f", 2, 8)) == b"CDEFGH"
