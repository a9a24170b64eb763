"""A checkpoint spread over nodes is gathered to the head intact, despite damaged files and interrupted transfers."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.node_client import Nodes
from infra.head.storage.checkpoint_inventory import complete_tags
from infra.head.storage.gather import gather
from infra.node.storage.file_channel import Wanted, Watcher, files_in
from infra.node.storage.pull import partial_path, pull
from t5train.checkpoint import tags
from t5train.errors import HostUnreachable, IncompleteCheckpoint, StorageError, Unreadable
from t5train.files.run_folder import tag_of
from tests.support.simulated_nodes import RUN, Site, digest

PART_OF_B = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


class Cut:
    """A transport on which sending files breaks off after ``after_bytes`` bytes."""

    def __init__(self, transport: Any, after_bytes: int) -> None:
        self.transport, self.after_bytes = transport, after_bytes

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        inner = self.transport.command(host, argv)
        if argv[-1] != "send":
            return list(inner)
        cut = "import subprocess, sys; node = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE); "
        cut += "out = sys.stdout.buffer; out.write(node.stdout.read(int(sys.argv[1]))); out.flush(); node.kill(); "
        return [sys.executable, "-c", cut + "sys.exit(255)", str(self.after_bytes), *inner]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def tiny_disk(site: Site) -> Iterator[Path]:
    """The head's checkpoints folder, on a disk of 1 MiB."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", site.checkpoints], check=True)
    yield site.checkpoints
    subprocess.run(["umount", site.checkpoints], check=True)


def test_what_lies_in_parts_on_nodes_is_gathered_into_one_checkpoint(site: Site) -> None:
    contents = site.save(8)
    told: list[int] = []
    gather(site.nodes, RUN, site.newest(), site.checkpoints, lambda _what, done, _total: told.append(done))
    folder = site.checkpoints / tag_of(8)
    assert [one.rank for one in tags.require_complete(folder)] == [0, 1]
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == contents
    assert told[-1] == sum(map(len, contents.values()))
    written = {path.name: path.stat().st_ino for path in folder.iterdir()}
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == written, "what is there is left alone"


def test_a_transfer_that_broke_off_goes_on_where_it_stood(site: Site) -> None:
    contents = site.save(8, size=4_000_000)
    tag, folder = site.newest(), site.checkpoints / tag_of(8)
    broken = Nodes(Cut(site.transport, 2_500_000), site.nodes.hosts)
    with pytest.raises(HostUnreachable, match=r"^[ab]: "):
        gather(broken, RUN, tag, site.checkpoints)
    assert not list(folder.glob("rank-*.json")), "a sidecar says that files are there"
    parts = {path: path.stat().st_size for path in folder.glob(".*.part")}
    assert sum(parts.values()) > 2_000_000
    inodes = {path: path.stat().st_ino for path in parts}
    gather(site.nodes, RUN, tag, site.checkpoints)
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == contents
    final = {partial_path(path): path.stat().st_ino for path in folder.glob("*.pt")}
    assert inodes.items() <= final.items(), "a part that had come was thrown away"


def test_a_part_that_was_damaged_meanwhile_is_taken_anew(site: Site) -> None:
    contents, folder = site.save(8), site.checkpoints / tag_of(8)
    folder.mkdir()
    (folder / f".{PART_OF_B}.part").write_bytes(bytes(1000))
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 1000)], ids=["bit flipped", "cut short"])
def test_a_damaged_file_is_taken_from_where_it_is_whole(site: Site, damage: Callable[[Path], None]) -> None:
    contents, folder = site.save(8), site.checkpoints / tag_of(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    damage(folder / PART_OF_B)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]


def loop(path: Path) -> None:
    """Replace a file with a link to itself: opening it then fails with ELOOP, not as if it were absent."""
    path.unlink()
    path.symlink_to(path.name)


def test_a_copy_that_cannot_be_read_is_replaced_from_a_node_and_kept(site: Site) -> None:
    contents, folder = site.save(8), site.checkpoints / tag_of(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    for name in (PART_OF_B, "rank-00001.json"):
        loop(folder / name)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    tags.require_complete(folder)
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]
    aside = sorted((folder.parent.parent / "set-aside").iterdir())
    assert [path.is_symlink() for path in aside] == [True, True]
    assert aside[1].name.startswith(f"{tag_of(8)}-{PART_OF_B}.")


def test_a_copy_that_nobody_else_has_and_that_cannot_be_read_is_not_taken_for_damaged(site: Site) -> None:
    site.save(8)
    gather(site.nodes, RUN, tag := site.newest(), site.checkpoints)
    loop(site.checkpoints / tag_of(8) / PART_OF_B)
    for damage in (flip, Path.unlink):
        damage(site.tag("b", 8) / PART_OF_B)
        with pytest.raises(Unreadable, match=rf"{PART_OF_B} may be intact.*{PART_OF_B} cannot be read now"):
            gather(site.nodes, RUN, tag, site.checkpoints)
        assert (site.checkpoints / tag_of(8) / PART_OF_B).is_symlink()


def test_a_node_that_cannot_read_what_it_alone_has_is_named(site: Site) -> None:
    site.save(8)
    tag = site.newest()
    loop(site.tag("b", 8) / PART_OF_B)
    with pytest.raises(Unreadable, match=rf"b/.*{PART_OF_B} cannot be read now \(Too many levels"):
        gather(site.nodes, RUN, tag, site.checkpoints)


def test_a_file_that_is_damaged_everywhere_is_named_with_its_places_and_the_tag_stays_incomplete(site: Site) -> None:
    site.save(8)
    flip(site.tag("b", 8) / PART_OF_B)
    with pytest.raises(IncompleteCheckpoint, match=rf"no intact copy of {PART_OF_B} was found \(copies were on b\)"):
        gather(site.nodes, RUN, site.newest(), site.checkpoints)
    assert tags.complete_tags(site.checkpoints) == []


def test_of_two_files_of_one_name_the_one_that_its_writer_recorded_is_taken(site: Site) -> None:
    contents = site.save(8)
    other = site.tag("b", 8) / MODEL
    assert other.stat().st_size == len(contents[MODEL])
    assert other.read_bytes() != contents[MODEL]
    tag = site.newest()
    assert tag.places[MODEL] == ("a", "b")
    gather(site.nodes, RUN, tag, site.checkpoints)
    assert (site.checkpoints / tag.name / MODEL).read_bytes() == contents[MODEL]


def test_another_saving_of_a_tag_replaces_what_was_gathered_of_the_first(site: Site) -> None:
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    flip(site.checkpoints / tag_of(8) / PART_OF_B)
    contents = site.save(8, seed=1, versions={"torch": "2"})
    first, second = complete_tags(site.survey().found)
    with pytest.raises(IncompleteCheckpoint):
        gather(site.nodes, RUN, first, site.checkpoints)
    gather(site.nodes, RUN, second, site.checkpoints)
    tags.require_complete(site.checkpoints / tag_of(8))
    assert (site.checkpoints / tag_of(8) / PART_OF_B).read_bytes() == contents[PART_OF_B]


def test_a_node_that_is_away_is_not_needed_for_what_the_head_has(site: Site) -> None:
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    gather(site.nodes.on(), RUN, site.newest(), site.checkpoints)


def test_a_disk_that_fills_up_leaves_what_has_come_and_is_gone_on_with(tmp_path: Path, tiny_disk: Path) -> None:
    content = os.urandom(600_000)
    (tmp_path / "f").write_bytes(content)
    (tiny_disk / "ballast").write_bytes(bytes(700_000))
    wanted = [Wanted.of("f", digest(content))]
    with pytest.raises(StorageError, match="f cannot be written: No space left on device; free some disk space"):
        pull(files_in(tmp_path), wanted, tiny_disk, Watcher())
    come = partial_path(tiny_disk / "f").stat().st_size
    (tiny_disk / "ballast").unlink()
    asked: list[int] = []

    def source(name: str, offset: int, size: int) -> Iterator[bytes]:
        asked.append(offset)
        return files_in(tmp_path)(name, offset, size)

    pull(source, wanted, tiny_disk, Watcher())
    assert asked == [come]
    assert come > 200_000
    assert (tiny_disk / "f").read_bytes() == content


HEAD = """
import sys
from pathlib import Path
from infra.head.storage.gather import gather
from infra.head.hosts.node_client import Nodes
from infra.head.storage.checkpoint_inventory import survey
from infra.head.storage.checkpoint_inventory import complete_tags
from tests.support.simulated_nodes import LocalHosts

run, checkpoints = sys.argv[1], Path(sys.argv[2])
nodes = Nodes(LocalHosts(Path(sys.argv[3])), ("a", "b"))
tag = complete_tags(survey(nodes, run, checkpoints).found)[0]
print("gathering", flush=True)
gather(nodes, run, tag, checkpoints)
"""


def test_a_head_that_is_killed_at_any_moment_leaves_nothing_that_looks_complete_and_is_not(site: Site) -> None:
    site.save(8, size=8_000_000)
    argv = [sys.executable, "-c", HEAD, RUN, str(site.checkpoints), str(site.folder / "hosts")]
    moments = random.Random(0)
    for _ in range(5):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdout is not None
            assert head.stdout.readline() == "gathering\n"
            time.sleep(moments.uniform(0, 0.4))
            head.kill()
        for tag in tags.complete_tags(site.checkpoints):
            tags.require_complete(site.checkpoints / tag)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    tags.require_complete(site.checkpoints / tag_of(8))


def test_a_disk_without_room_is_told_before_anything_is_sent(site: Site, tiny_disk: Path) -> None:
    site.save(8, size=600_000)
    with pytest.raises(StorageError, match="checkpoint step-00000008 needs"):
        gather(site.nodes, RUN, site.newest(), tiny_disk)
    assert not list(tiny_disk.rglob("*.p*t"))
