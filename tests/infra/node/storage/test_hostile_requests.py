"""Whatever names a request contains, a node accesses nothing outside the folders that the request is about."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.node.attempts.run_ownership import NodeStore
from infra.node.messages import Query, Request
from infra.node.node_folders import run_path
from infra.node.storage import stored_checkpoints as stored
from infra.node.storage.chain_copy import ReleaseRun, Stage
from infra.node.storage.file_channel import Wanted, Watcher, files_in
from infra.node.storage.pull import is_whole, missing_bytes, pull
from t5train.errors import HostError, StorageError
from tests.support.simulated_nodes import RUN, Site, await_end

OUT = "../../../outside"
HERE = NodeStore(None, None)
FILE = Wanted(f"{OUT}/secret", 6, "0" * 64)
QUERIES: list[Query[Any]] = [
    stored.ListCheckpoints(HERE, OUT),
    stored.PruneCheckpoints(HERE, RUN, (f"../{OUT}",)),
    stored.ListFiles(HERE, OUT, ("secret",)),
    stored.ListFiles(HERE, run_path(RUN), (f"{OUT}/secret",)),
    ReleaseRun(HERE, OUT),
]
REQUESTS: list[Request] = [
    stored.SendFiles(HERE, OUT),
    stored.ReceiveFiles(HERE, RUN, OUT, (replace(FILE, name="secret"),), None),
    stored.ReceiveFiles(HERE, RUN, run_path(RUN), (FILE,), None),
    Stage(HERE, RUN, OUT, (), "ab" * 32, 0),
    Stage(HERE, OUT, "shards/x", (), "ab" * 32, 0),
]


@pytest.mark.parametrize("request_", [*QUERIES, *REQUESTS], ids=lambda request: request.action)
def test_a_request_with_a_name_outside_its_folder_is_refused_and_changes_nothing(site: Site, request_: Request) -> None:
    outside = site.scratch("a").parent.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    site.save(8)
    before = contents_below(site.folder)
    for host in site.nodes.hosts:
        with pytest.raises(HostError, match="leads out of its folder"):
            send(site, host, request_)
    assert contents_below(site.folder) == before


def send(site: Site, host: str, request: Request) -> None:
    if isinstance(request, Query):
        answer = site.nodes.on(host).ask(request, 20)[host]
        if isinstance(answer, HostError):
            raise answer
    else:
        await_end(site.nodes, host, request)


def test_only_tags_can_be_moved_aside(site: Site) -> None:
    site.save(8)
    request = stored.MoveAside(HERE, RUN, ("../checkpoints", "."), "it is asked for")
    assert site.nodes.ask(request, 20) == dict.fromkeys("ab", stored.MovedAside(()))
    assert site.tag("a", 8).is_dir()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_a_peer_cannot_read_outside_the_served_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(StorageError, match=r"which (leads out|is not a relative path)"):
        list(files_in(tmp_path / "served")(name, 0, 1))


def test_a_file_name_outside_the_folder_is_neither_checked_nor_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "into").mkdir()
    wanted, into = Wanted("../secret", 6, "0" * 64), tmp_path / "into"
    for act in (
        lambda: missing_bytes(into, [wanted]),
        lambda: is_whole(into, wanted),
        lambda: pull(lambda *_: iter([b"forged"]), [wanted], into, Watcher()),
    ):
        with pytest.raises(StorageError, match="leads out"):
            act()
    assert (tmp_path / "secret").read_text() == "secret"


def contents_below(folder: Path) -> dict[Path, bytes | None]:
    """The content of every file; None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
