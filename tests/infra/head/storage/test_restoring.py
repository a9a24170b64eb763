"""A node gets the files of a checkpoint that it lacks, and only those."""

import shutil

from infra.head.storage.gather import gather
from infra.head.storage.provisioning import part, restore
from infra.node.node_folders import tag_path
from t5train.checkpoint.tags import files_read_by
from t5train.files.run_folder import tag_of
from tests.support.simulated_nodes import PART_OF_B, RUN, Site, flip_bit, link_to_itself


def restored(site: Site, rank: int) -> int:
    """Restore the newest checkpoint's files on the node of ``rank``, and return how many files its ranks need."""
    tag = site.newest()
    gather(site.nodes, RUN, tag, site.checkpoints)
    wanted = part(tag, files_read_by(rank, tag.sidecars), [rank])
    tag_folder, parts = tag_path(RUN, tag.name), {site.nodes.hosts[rank]: wanted}
    restore(site.nodes, RUN, tag_folder, parts, site.checkpoints / tag.name, recorded=tag.files)
    return len(wanted)


def test_a_node_with_a_new_disk_gets_its_part_of_the_checkpoint(site: Site) -> None:
    contents = site.save(8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    shutil.rmtree(site.scratch("b"))
    restored(site, 1)
    folder = site.tag("b", 8)
    own = ["mp_rank_00_model_states.pt", PART_OF_B]
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == {name: contents[name] for name in own}
    sidecar = "rank-00001.json"
    assert (folder / sidecar).read_bytes() == (site.checkpoints / tag_of(8) / sidecar).read_bytes()


def test_a_flipped_bit_on_a_node_is_repaired_and_its_own_replica_is_not_replaced(site: Site) -> None:
    contents = site.save(8)
    replica = site.tag("b", 8) / "mp_rank_00_model_states.pt"
    before = replica.read_bytes()
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    flip_bit(site.tag("b", 8) / PART_OF_B)
    restored(site, 1)
    assert (site.tag("b", 8) / PART_OF_B).read_bytes() == contents[PART_OF_B]
    assert replica.read_bytes() == before


def test_an_unreadable_copy_is_replaced_and_set_aside_and_so_are_unrecorded_pickles(site: Site) -> None:
    contents = site.save(8)
    folder = site.tag("b", 8)
    gather(site.nodes, RUN, site.newest(), site.checkpoints)
    link_to_itself(folder / PART_OF_B)
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"of a saving by three ranks")
    restored(site, 1)
    assert (folder / PART_OF_B).read_bytes() == contents[PART_OF_B]
    aside = sorted((site.scratch("b") / "set-aside" / RUN).iterdir())
    assert [path.name.rpartition(".")[0] for path in aside] == [
        f"{tag_of(8)}-{PART_OF_B}",
        f"{tag_of(8)}-zero_pp_rank_2_mp_rank_00_optim_states.pt",
    ]
    assert aside[0].is_symlink()
    assert aside[1].read_bytes() == b"of a saving by three ranks"
