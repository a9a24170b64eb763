"""A tag is complete if its locations together hold every sidecar of one save and every file that these list."""

import re
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.head.storage.checkpoint_inventory import complete_tags, missing_parts, prunable
from infra.node.storage.stored_checkpoints import HEAD, Copy, Inventory
from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import sidecar_name
from t5train.files.run_folder import tag_of
from tests.support.simulated_nodes import digest, make_sidecar

LOCATIONS, RANKS, STEPS, SAVINGS = [HEAD, "a", "b"], (0, 1), (8, 16), ("1", "two")
SavesByLocation = dict[tuple[str, int, int], str]
"""The save from which a location has a rank's sidecar, or its file, by location, step and rank."""


@cache
def text_of(step: int, rank: int, saving: str, world_size: int = len(RANKS)) -> str:
    """Text of the sidecar of a rank that wrote one file in ``saving``. The file's size differs between saves."""
    files = {file_of(rank): digest(saving.encode())}
    with tempfile.TemporaryDirectory() as folder:
        sidecar.write(Path(folder), make_sidecar(rank, step, files, world_size, saving=saving))
        return (Path(folder) / sidecar_name(rank)).read_text("utf-8")


def file_of(rank: int) -> str:
    return f"part-{rank}.pt"


def inventories(sidecars: SavesByLocation, files: SavesByLocation) -> dict[str, Inventory]:
    def copy(location: str, step: int) -> Copy:
        texts = {
            sidecar_name(rank): text_of(step, rank, sidecars[location, step, rank])
            for rank in RANKS
            if (location, step, rank) in sidecars
        }
        sizes = {file_of(rank): len(files[location, step, rank]) for rank in RANKS if (location, step, rank) in files}
        return Copy(texts, sizes)

    return {location: {tag_of(step): copy(location, step) for step in STEPS} for location in LOCATIONS}


SPREAD = st.dictionaries(
    st.tuples(st.sampled_from(LOCATIONS), st.sampled_from(STEPS), st.sampled_from(RANKS)), st.sampled_from(SAVINGS)
)


@given(sidecars=SPREAD, files=SPREAD)
def test_a_tag_is_complete_exactly_if_one_save_has_all_files(sidecars: SavesByLocation, files: SavesByLocation) -> None:
    found = complete_tags(inventories(sidecars, files))
    assert [tag.step for tag in found] == sorted((tag.step for tag in found), reverse=True)
    for tag in found:
        assert len({one.saving for one in tag.sidecars}) == 1
        assert [one.rank for one in tag.sidecars] == list(RANKS)
        for rank in RANKS:
            size = tag.files[file_of(rank)].size
            assert tag.places[file_of(rank)]
            assert all(len(files[location, tag.step, rank]) == size for location in tag.places[file_of(rank)])
    complete = {(tag.step, tag.sidecars[0].saving) for tag in found}
    for step in STEPS:
        for saving in SAVINGS:
            nodes_agree = all(saving == seen for (location, at, _), seen in sidecars.items() if location and at == step)
            spread = all(any(sidecars.get((location, step, rank)) == saving for location in "ab") for rank in RANKS)
            present = all(any(files.get((location, step, rank)) == saving for location in LOCATIONS) for rank in RANKS)
            if nodes_agree and spread and present:
                assert (step, saving) in complete, "the only save on the nodes has all its files"


@given(sidecars=SPREAD, files=SPREAD, keep=st.integers(1, 2))
def test_pruning_keeps_the_newest_tags_and_any_that_may_still_be_written(
    sidecars: SavesByLocation, files: SavesByLocation, keep: int
) -> None:
    found = inventories(sidecars, files)
    complete = sorted({tag.name for tag in complete_tags(found)}, reverse=True)
    pruned = prunable(found, keep)
    assert not set(pruned) & set(complete[:keep])
    assert set(complete[keep:]) <= set(pruned)
    assert all(complete and name < complete[0] for name in pruned)


def complete_inventory(steps: tuple[int, ...]) -> dict[str, Inventory]:
    texts = {step: text_of(step, 0, "1", world_size=1) for step in steps}
    return {"a": {tag_of(step): Copy({"rank-00000.json": text}, {file_of(0): 1}) for step, text in texts.items()}}


def test_the_newest_tags_those_at_multiples_of_keep_every_and_folders_of_users_are_kept() -> None:
    assert prunable(complete_inventory((4, 8, 12, 16, 20)), 2, keep_every=8) == [tag_of(4), tag_of(12)]
    found = complete_inventory((8, 16))
    found["a"] = {**found["a"], "a copy": Copy({}, {}), "removed-0123abcd": Copy({}, {})}
    assert prunable(found, 2) == ["removed-0123abcd"]


@pytest.mark.parametrize(
    ("sidecars", "files", "why"),
    [
        ({("a", 8, 0): "1"}, {("a", 8, 0): "1"}, r"lacks rank-00001\.json \(ranks \[1\] of 2 have no sidecar\)"),
        ({("a", 8, 0): "1", ("b", 8, 1): "1"}, {("a", 8, 0): "1"}, r"lacks part-1\.pt, which rank 1 wrote"),
        ({("a", 8, 0): "1", ("b", 8, 1): "two"}, {}, r"differ in saving"),
        ({("a", 8, 0): "1", ("b", 8, 0): "two"}, {}, r"rank-00000\.json from two different saves, on a and on b"),
    ],
)
def test_missing_parts_say_why_a_tag_is_incomplete(sidecars: SavesByLocation, files: SavesByLocation, why: str) -> None:
    missing = missing_parts(inventories(sidecars, files))
    assert re.search(why, missing[tag_of(8)])


def test_a_tag_with_a_file_that_cannot_be_read_now_is_not_pruned() -> None:
    found = complete_inventory((8, 16, 24))
    unreadable = Copy({}, {file_of(0): 1}, {"rank-00000.json": "it cannot be read now"})
    assert prunable({"a": {**found["a"], tag_of(8): Copy({}, {file_of(0): 1})}}, 2) == [tag_of(8)]
    assert prunable({"a": {**found["a"], tag_of(8): unreadable}}, 2) == []
