"""A checkpoint that lies in parts on nodes comes to the head whole, whatever was damaged on the way."""

from infra.node_store.gather import gather
from t5train import sidecar
from t5train.train.job import tag_of
from tests.infra.node_store.conftest import RUN, Site


def test_what_lies_in_parts_on_nodes_is_gathered_into_one_checkpoint(site: Site) -> None:
    contents = site.save(8)
    told: list[int] = []
    gather(site.nodes, RUN, site.newest(), site.checkpoints, lambda _what, done, _total: told.append(done))
    folder = site.checkpoints / tag_of(8)
    assert [one.rank for one in sidecar.require_complete(folder)] == [0, 1]
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == contents
    assert told[-1] == sum(map(len, contents.values()))
