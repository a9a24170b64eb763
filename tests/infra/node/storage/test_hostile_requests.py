"""A node reads, writes and removes nothing outside the folders that a request is about, whatever names it has."""

from pathlib import Path
from typing import Any

import pytest

from infra.node.node_folders import run_place
from infra.node.storage.file_channel import Wanted, Watcher, files_in
from infra.node.storage.pull import is_whole, missing_bytes, pull
from t5train.errors import HostError, StorageError
from tests.support.simulated_nodes import RUN, Site

OUT = "../../../outside"
FILE = {"name": f"{OUT}/secret", "size": 6, "sha256": "0" * 64}
IN_RUN = {"place": run_place(RUN), "run_name": RUN}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("inventory", {"run_name": OUT}),
    ("prune", {"run_name": RUN, "tags": [f"../{OUT}"]}),
    ("listing", {"place": OUT, "names": ["secret"]}),
    ("listing", {**IN_RUN, "names": [f"{OUT}/secret"]}),
    ("send", {"place": OUT}),
    ("receive", {"place": OUT, "run_name": RUN, "recorded": None, "files": [FILE | {"name": "secret"}]}),
    ("receive", {**IN_RUN, "recorded": None, "files": [FILE]}),
    ("stage", {"place": OUT, "run_name": RUN, "files": [], "token": "ab" * 32, "beside_bytes": 0}),
    ("stage", {"place": "shards/x", "run_name": OUT, "files": [], "token": "ab" * 32, "beside_bytes": 0}),
    ("release", {"run_name": OUT}),
]


@pytest.mark.parametrize(("action", "facts"), REQUESTS, ids=[f"{n}-{action}" for n, (action, _) in enumerate(REQUESTS)])
def test_a_name_that_leads_out_is_refused_and_changes_nothing(site: Site, action: str, facts: dict[str, Any]) -> None:
    outside = site.scratch("a").parent.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    site.save(8)
    before = everything_below(site.folder)
    answers = site.nodes.ask(action, lambda _: site.nodes.request(**facts), 20)
    for answer in answers.values():
        assert isinstance(answer, HostError)
        assert "leads out of its folder" in str(answer)
    assert everything_below(site.folder) == before


def test_a_move_aside_takes_only_tags(site: Site) -> None:
    site.save(8)
    request = site.nodes.request(run_name=RUN, tags=["../checkpoints", "."], why="it is asked for")
    assert site.nodes.ask("move_aside", lambda _: request, 20) == {"a": {"tags": []}, "b": {"tags": []}}
    assert site.tag("a", 8).is_dir()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_a_peer_reads_nothing_outside_the_folder_that_is_served(tmp_path: Path, name: str) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(StorageError, match=r"which (leads out|is not a relative path)"):
        list(files_in(tmp_path / "served")(name, 0, 1))


def test_a_file_whose_name_leads_out_is_neither_measured_nor_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "into").mkdir()
    wanted = [Wanted("../secret", 6, "0" * 64)]
    with pytest.raises(StorageError, match="leads out"):
        missing_bytes(tmp_path / "into", wanted)
    with pytest.raises(StorageError, match="leads out"):
        is_whole(tmp_path / "into", wanted[0])
    with pytest.raises(StorageError, match="leads out"):
        pull(lambda *_: iter([b"forged"]), wanted, tmp_path / "into", Watcher())
    assert (tmp_path / "secret").read_text() == "secret"


def everything_below(folder: Path) -> dict[Path, bytes | None]:
    """The content of every file; None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
