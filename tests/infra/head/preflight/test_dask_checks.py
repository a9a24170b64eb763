"""Before a run begins, hosts that cannot tokenise are named with what to do."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.host_selection import asked
from infra.head.hosts.hostfile import read_hosts
from infra.head.preflight.checklist import judge
from infra.head.preflight.run_checks import require_possible
from infra.head.preflight.text_checks import NOT_READ, TextFacts
from infra.node.inspection.software import DASK
from t5train.checkpoint.resume import open_run
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.errors import SpecError
from t5train.records.stage_records import MANIFEST, TokenShards
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.generated_text import write_jsonl
from tests.support.host_facts import HOSTS, NONCE, REQUIREMENTS, SOFTWARE, reply, with_

TOKENISING = replace(REQUIREMENTS, tokenises=True)
UNKNOWN_TEXT = TextFacts((), None, is_partly_made=True)
ON_HOSTS = {"cluster.hostfile": "hosts", "shards.executor": "dask"}


def packages(version: str) -> dict[str, str]:
    return {**SOFTWARE.packages, DASK: version}


def problems(of_hosts: dict[str, str], of_head: str, *, tokenises: bool = True) -> list[str]:
    """What is found if each host, and the head, has such a version of Dask."""
    replies = reply({host: with_("software", packages=packages(version)) for host, version in of_hosts.items()})
    head = replace(SOFTWARE, packages=packages(of_head))
    requirements = replace(REQUIREMENTS, tokenises=tokenises)
    return [f"{each.check}: {each.text}" for each in judge(replies, requirements, head, NONCE).findings]


def test_every_host_needs_the_heads_version_of_dask() -> None:
    same = dict.fromkeys(HOSTS, "2026.8.0")
    assert not problems(same, "2026.8.0")
    found = problems({**same, "node1": "", "node3": ""}, "2026.8.0")
    assert len(found) == 1
    assert found[0].startswith("packages: node1, node3: distributed missing, the head has 2026.8.0")
    assert "Install t5-pretrain[dask] with distributed==2026.8.0 there, or set shards.executor=local" in found[0]


def test_the_head_needs_dask_itself_until_the_shards_exist() -> None:
    (found,) = problems(dict.fromkeys(HOSTS, ""), "")
    assert found.startswith("packages: distributed missing on this machine, but shards.executor is dask. Install")
    assert not problems(dict.fromkeys(HOSTS, ""), "", tokenises=False)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """The spec of a run whose hosts tokenise a text of this machine."""
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n", "utf-8")
    text = write_jsonl(tmp_path / "text.jsonl", 1000)
    paths = {"corpus.source": text, "storage.root": tmp_path / "root", "cluster.hostfile": tmp_path / "hosts"}
    numbers = {"tokenizer.vocab_size": 300, "cluster.ranks": 2}
    return recipe("smoke", {**{name: str(path) for name, path in paths.items()}, **numbers, "shards.executor": "dask"})


def make_shards(spec: RunSpec) -> TokenShards:
    root = spec.storage.root
    corpus = build_corpus(spec.corpus, root)
    tokenizer = build_tokenizer(spec.tokenizer, spec.corpus, corpus, root)
    return build_shards(spec.shards, spec.corpus, corpus, tokenizer, root)


def tokenises(spec: RunSpec, text: TextFacts = UNKNOWN_TEXT) -> bool:
    """Whether the checks before a run require hosts that can tokenise."""
    with asked(spec, read_hosts(spec.cluster), require_possible(spec), text) as (requirements, _):
        return requirements.tokenises


def test_a_run_requires_dask_until_the_shards_that_it_was_begun_with_exist(spec: RunSpec) -> None:
    assert tokenises(spec)
    shards = make_shards(spec)
    assert tokenises(spec), "without reading the whole text, nobody knows whether these shards are the run's"
    open_run(spec, shards)
    assert not tokenises(spec)
    assert make_shards(spec).reused
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
        damage(next(shards.path.glob("*.bin")))
        assert tokenises(spec)
        assert not make_shards(spec).reused
        assert not tokenises(spec)
    (shards.path / MANIFEST).unlink()
    assert tokenises(spec)
    assert not make_shards(spec).reused


def test_a_run_whose_text_has_another_name_now_tokenises_it_again(spec: RunSpec) -> None:
    open_run(spec, make_shards(spec))
    other = Path(spec.corpus.source).rename(Path(spec.corpus.source).with_name("moved.jsonl"))
    moved = spec.with_settings({"corpus.source": str(other)})
    assert tokenises(moved)
    assert not make_shards(moved).reused


def test_given_shards_or_a_machine_that_tokenises_itself_do_not_require_dask(spec: RunSpec) -> None:
    assert not tokenises(spec, NOT_READ)
    assert not tokenises(spec.with_settings({"shards.executor": "local"}))


def test_hosts_that_tokenise_have_to_share_the_root() -> None:
    unshared = reply(dict.fromkeys(HOSTS, with_("resources", nonce="")))
    found = [each for each in judge(unshared, TOKENISING, SOFTWARE, NONCE).findings if each.is_problem]
    assert [each.check for each in found] == ["root"]
    assert "share no storage with the head, but shards.executor is dask. Mount /shared/t5 on every" in found[0].text
    assert not [each for each in judge(unshared, REQUIREMENTS, SOFTWARE, NONCE).findings if each.is_problem]


def test_without_a_hostfile_there_are_no_hosts_to_tokenise_on() -> None:
    with pytest.raises(SpecError, match=r"shards\.executor is dask, but cluster\.hostfile is not set: give --hostfile"):
        recipe("smoke", {"shards.executor": "dask"})
