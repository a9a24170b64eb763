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

from infra.head.hosts.nodes import Nodes
from infra.head.storage.checkpoint_inventory import complete_tags
from infra.head.storage.gather import gather
from infra.node.storage.file_channel import Wanted, Watcher, files_in
from infra.node.storage.pull import partial_path, pull
from t5train.checkpoint import tags
from t5train.errors import HostUnreachable, IncompleteCheckpoint, StorageError, Unreadable
from t5train.files.run_folder import tag_of
from tests.support.simulated_nodes import PART_OF_B, RUN, Site, digest, flip_bit, link_to_itself

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


@pytest.fixture
def tiny_disk(site: Site) -> Iterator[Path]:
    """The head's checkpoints folder, on a disk of 1 MiB."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", site.checkpoints], check=True)
    yield site.checkpoints
    subprocess.run(["umount", site.checkpoints], check=True)


def test_parts_on_several_nodes_are_gathered_into_one_checkpoint(site: Site) -> None:
    contents = site.save(8)
    reported: list[int] = []
    gather(site.nodes, RUN, site.newest(), site.checkpoints, lambda _what, done, _total: reported.append(done))
    folder = site.checkpoints / tag_of(8)
    assert [one.rank for one in tags.require_complete(folder)] == [0, 1]
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == contents
    assert reported[-1] == sum(map(len, contents.values()))
    written = {path.name: path.stat().st_ino for path in folder.iterdir()}
    gather(site.nodes.on(), RUN, site.newest(), site.checkpoints)  # an absent node is not needed for what is here
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == written, "files were written again"


def test_an_interrupted_transfer_resumes_where_it_stopped(site: Site) -> None:
    contents = site.save(8, size=4_000_000)
    tag, folder = site.newest(), site.checkpoints / tag_of(8)
    broken = Nodes(Cut(site.transport, 2_500_000), site.nodes.hosts)
    with pytest.raises(HostUnreachable, match=r"^[ab]: "):
        gather(broken, RUN, tag, site.checkpoints)
    assert not list(folder.glob("rank-*.json")), "a sidecar was written before the files that it lists"
    parts = {path: path.stat().st_size for path in folder.glob(".*.part")}
    assert sum(parts.values()) > 2_000_000
    inodes = {path: path.stat().st_ino for path in parts}
    for path in parts:
        path.with_suffix(".held").hardlink_to(path)  # otherwise a new file might get the inode of a discarded one
    gather(site.nodes, RUN, tag, site.checkpoints)
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == contents
    final = {partial_path(path): path.stat().st_ino for path in folder.glob("*.pt")}
    assert inodes.items() <= final.items(), "a partial file was discarded"


def test_a_damaged_partial_file_is_transferred_again(site: Site) -> None:
    contents, folder = site.save(8), site.checkpoints / tag_of(8)
    folder.mkdir()
    (folder / f".{PART_OF_B}.part").write_bytes(bytes(1000))
    reported: list[tuple[int, int | None]] = []
    gather(site.nodes, RUN, site.newest(), site.checkpoints, lambda _what, done, total: reported.append((done, total)))
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]
    total = sum(map(len, contents.values()))
    assert reported[-1] == (total, total), "bytes that arrived damaged were counted, too"
    assert max(done for done, _ in reported) == total


@pytest.mark.parametrize("damage", [flip_bit, lambda path: os.truncate(path, 1000)], ids=["bit flipped", "cut short"])
def test_a_damaged_file_is_replaced_from_an_intact_copy(site: Site, damage: Callable[[Path], None]) -> None:
    contents, folder = site.save(8), site.checkpoints / tag_of(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    damage(folder / PART_OF_B)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]


def test_a_copy_that_cannot_be_read_is_replaced_from_a_node_and_set_aside(site: Site) -> None:
    contents, folder = site.save(8), site.checkpoints / tag_of(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    for name in (PART_OF_B, "rank-00001.json"):
        link_to_itself(folder / name)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    tags.require_complete(folder)
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]
    aside = sorted((folder.parent.parent / "set-aside").iterdir())
    assert [path.is_symlink() for path in aside] == [True, True]
    assert aside[1].name.startswith(f"{tag_of(8)}-{PART_OF_B}.")


def test_the_only_possibly_intact_copy_is_named_and_kept_if_it_cannot_be_read_now(site: Site) -> None:
    contents, tag = site.save(8), site.newest()
    link_to_itself(site.tag("b", 8) / PART_OF_B)
    with pytest.raises(Unreadable, match=rf"b/.*{PART_OF_B} cannot be read now \(Too many levels"):
        gather(site.nodes, RUN, tag, site.checkpoints)
    (site.tag("b", 8) / PART_OF_B).unlink()
    (site.tag("b", 8) / PART_OF_B).write_bytes(contents[PART_OF_B])
    gather(site.nodes, RUN, tag, site.checkpoints)
    link_to_itself(site.checkpoints / tag_of(8) / PART_OF_B)
    for damage in (flip_bit, Path.unlink):
        damage(site.tag("b", 8) / PART_OF_B)
        with pytest.raises(Unreadable, match=rf"{PART_OF_B} may be intact.*{PART_OF_B} cannot be read now"):
            gather(site.nodes, RUN, tag, site.checkpoints)
        assert (site.checkpoints / tag_of(8) / PART_OF_B).is_symlink()


def test_a_file_damaged_on_every_host_is_named_with_its_hosts_and_the_tag_stays_incomplete(site: Site) -> None:
    site.save(8)
    flip_bit(site.tag("b", 8) / PART_OF_B)
    with pytest.raises(IncompleteCheckpoint, match=rf"no intact copy of {PART_OF_B} was found \(copies were on b\)"):
        gather(site.nodes, RUN, site.newest(), site.checkpoints)
    assert tags.complete_tags(site.checkpoints) == []


def test_of_two_files_with_one_name_the_one_recorded_by_its_writer_is_gathered(site: Site) -> None:
    contents = site.save(8)
    other = site.tag("b", 8) / MODEL
    assert other.stat().st_size == len(contents[MODEL])
    assert other.read_bytes() != contents[MODEL]
    tag = site.newest()
    assert tag.places[MODEL] == ("a", "b")
    gather(site.nodes, RUN, tag, site.checkpoints)
    assert (site.checkpoints / tag.name / MODEL).read_bytes() == contents[MODEL]


def test_a_second_save_of_a_tag_replaces_the_gathered_files_of_the_first(site: Site) -> None:
    site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    flip_bit(site.checkpoints / tag_of(8) / PART_OF_B)
    contents = site.save(8, seed=1, versions={"torch": "2"})
    first, second = complete_tags(site.survey().found)
    with pytest.raises(IncompleteCheckpoint):
        gather(site.nodes, RUN, first, site.checkpoints)
    gather(site.nodes, RUN, second, site.checkpoints)
    tags.require_complete(site.checkpoints / tag_of(8))
    assert (site.checkpoints / tag_of(8) / PART_OF_B).read_bytes() == contents[PART_OF_B]


def test_a_full_disk_keeps_the_partial_file_and_the_transfer_resumes_from_it(tmp_path: Path, tiny_disk: Path) -> None:
    content = os.urandom(600_000)
    (tmp_path / "f").write_bytes(content)
    (tiny_disk / "ballast").write_bytes(bytes(700_000))
    wanted = [Wanted.of("f", digest(content))]
    with pytest.raises(StorageError, match=r"f cannot be written: No space left on device; free some space there"):
        pull(files_in(tmp_path), wanted, tiny_disk, Watcher())
    received = partial_path(tiny_disk / "f").stat().st_size
    (tiny_disk / "ballast").unlink()
    offsets: list[int] = []

    def source(name: str, offset: int, size: int) -> Iterator[bytes]:
        offsets.append(offset)
        return files_in(tmp_path)(name, offset, size)

    pull(source, wanted, tiny_disk, Watcher())
    assert offsets == [received]
    assert received > 200_000
    assert (tiny_disk / "f").read_bytes() == content


HEAD = """
import sys
from pathlib import Path
from infra.head.hosts.nodes import Nodes
from infra.head.storage.checkpoint_inventory import complete_tags, survey
from infra.head.storage.gather import gather
from tests.support.simulated_nodes import LocalHosts

run, checkpoints = sys.argv[1], Path(sys.argv[2])
nodes = Nodes(LocalHosts(Path(sys.argv[3]), sys.argv[4]), ("a", "b"))
tag = complete_tags(survey(nodes, run, checkpoints).found)[0]
print("gathering", flush=True)
gather(nodes, run, tag, checkpoints)
"""


@pytest.mark.slow
def test_a_head_killed_during_a_gather_never_leaves_an_incomplete_tag_that_looks_complete(
    site: Site, python_of_nodes: str
) -> None:
    site.save(8, size=8_000_000)
    argv = [sys.executable, "-c", HEAD, RUN, str(site.checkpoints), str(site.folder / "hosts"), python_of_nodes]
    generator = random.Random(0)
    for _ in range(5):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdout is not None
            assert head.stdout.readline() == "gathering\n"
            time.sleep(generator.uniform(0, 0.4))
            head.kill()
        for tag in tags.complete_tags(site.checkpoints):
            tags.require_complete(site.checkpoints / tag)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    tags.require_complete(site.checkpoints / tag_of(8))


def test_too_little_disk_space_is_reported_before_anything_is_sent(site: Site, tiny_disk: Path) -> None:
    site.save(8, size=600_000)
    with pytest.raises(StorageError, match="too little disk space for checkpoint step-00000008: "):
        gather(site.nodes, RUN, site.newest(), tiny_disk)
    assert not list(tiny_disk.rglob("*.p*t"))
