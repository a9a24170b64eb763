"""A tag is complete, over all places, when every rank's sidecar of one saving and every file they name are somewhere."""

from collections.abc import Mapping
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from infra.node_store.inventory import HEAD, Copy, Inventory
from infra.node_store.tags import complete_tags, shortcomings, superfluous
from t5train import sidecar
from t5train.sidecar import sidecar_name
from t5train.train.job import tag_of
from tests.infra.node_store.conftest import digest, make_sidecar

PLACES = [HEAD, "a", "b"]
RANKS = 2


def text_of(rank: int, step: int, saving: int, folder: Path) -> str:
    """The sidecar of a rank that wrote one file of its own in that saving."""
    files = {f"part-{rank}.pt": digest(f"{step} {saving} {rank}".encode())}
    sidecar.write(folder, make_sidecar(rank, step, files, RANKS, versions={"saving": str(saving)}))
    return (folder / sidecar_name(rank)).read_text("utf-8")


def size_of(step: int, saving: int, rank: int) -> int:
    return len(f"{step} {saving} {rank}")


Saved = tuple[str, int, int, int]
"""Place, step, rank, saving."""
Facts = st.sets(
    st.tuples(st.sampled_from(PLACES), st.sampled_from([8, 16]), st.integers(0, RANKS - 1), st.sampled_from([1, 22]))
)


def inventories(sidecars: set[Saved], files: set[Saved], folder: Path) -> dict[str, Inventory]:
    """Of two facts about one name in one place the later wins, as on a disk."""
    found: dict[str, dict[str, Copy]] = {place: {} for place in PLACES}
    for place, step, rank, saving in sorted(sidecars):
        texts = found[place].setdefault(tag_of(step), Copy({}, {})).sidecars
        texts |= {sidecar_name(rank): text_of(rank, step, saving, folder)}  # type: ignore[operator]  # a dict here
    for place, step, rank, saving in sorted(files):
        sizes = found[place].setdefault(tag_of(step), Copy({}, {})).files
        sizes |= {f"part-{rank}.pt": size_of(step, saving, rank)}  # type: ignore[operator]  # likewise
    return found


@given(sidecars=Facts, files=Facts)
def test_a_tag_is_complete_only_if_one_saving_is_there_whole(
    sidecars: set[Saved], files: set[Saved], tmp_path_factory: object
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = inventories(sidecars, files, Path(folder))
    for tag in complete_tags(found):
        savings = {one.versions["saving"] for one in tag.sidecars}
        for name, recorded in tag.files.items():
            assert tag.places[name]
            assert all(found[place][tag.name].files[name] == recorded.size for place in tag.places[name])
        assert [one.rank for one in tag.sidecars] == list(range(RANKS))
        assert all(text in {found[place].get(tag.name, Copy({}, {})).sidecars.get(name) for place in PLACES}
                   for name, text in tag.texts.items())  # fmt: skip
        assert len(savings) <= 2
