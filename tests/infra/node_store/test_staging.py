"""A folder gets to all nodes, each byte over each link once; what breaks goes on, and what is in use stays."""

import os
from pathlib import Path

import pytest

from infra.node_store import relay
from infra.node_store.pulling import Wanted, listed
from infra.node_store.staging import stage_folder
from infra.node_store.wire import BrokenOff, files_in
from t5train.errors import RemoteFailed
from tests.infra.node_store.conftest import Site

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


def test_every_node_has_the_folder_and_the_head_sent_it_once(make_site, shards: Path, caplog) -> None:  # type: ignore[no-untyped-def]  # fixtures
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
    with pytest.raises(RemoteFailed, match=r"^a: .*has .* GB free, shards/deadbeef needs"):
        stage_folder(site.nodes, shards, [Wanted("train.bin", 1 << 50, "0" * 64)], PLACE, "smoke")
    assert not (site.scratch("a") / PLACE).exists()


def test_who_does_not_know_the_token_gets_nothing(shards: Path) -> None:
    server = relay.serve(files_in(shards), TOKEN)
    with pytest.raises(BrokenOff, match="token"):
        relay.connect(server.address, server.port, "cd" * 32)
    channel = relay.connect(server.address, server.port, TOKEN)
    assert b"".join(channel.fetch("manifest.json", 10, 100)) == (shards / "manifest.json").read_bytes()[10:]
    channel.close()
