"""Before a run begins, hosts that cannot tokenise are named with what to do."""

from dataclasses import replace

import pytest

from infra.head.preflight.checklist import judge
from infra.node.inspection.software import DASK, software
from t5train.errors import SpecError
from t5train.spec.recipes import recipe
from tests.support.host_facts import HOSTS, NONCE, REQUIREMENTS, SOFTWARE, reply, with_

TOKENISING = replace(REQUIREMENTS, tokenises=True)
ON_HOSTS = {"cluster.hostfile": "hosts", "shards.executor": "dask"}


def packages(version: str) -> dict[str, str]:
    return {**SOFTWARE.packages, DASK: version}


def problems(of_hosts: dict[str, str], of_head: str) -> list[str]:
    """What is found if each host, and the head, has such a version of Dask."""
    replies = reply({host: with_("software", packages=packages(version)) for host, version in of_hosts.items()})
    head = replace(SOFTWARE, packages=packages(of_head))
    return [f"{each.check}: {each.text}" for each in judge(replies, TOKENISING, head, NONCE).findings]


def test_every_host_needs_the_heads_version_of_dask() -> None:
    same = dict.fromkeys(HOSTS, "2026.8.0")
    assert not problems(same, "2026.8.0")
    found = problems({**same, "node1": "", "node3": ""}, "2026.8.0")
    assert len(found) == 1
    assert found[0].startswith("packages: node1, node3: distributed missing, the head has 2026.8.0")
    assert "Install distributed==2026.8.0 there, or set shards.executor=local" in found[0]


def test_the_head_needs_dask_itself() -> None:
    (found,) = problems(dict.fromkeys(HOSTS, ""), "")
    assert found.startswith("packages: distributed missing on this machine, but shards.executor is dask. Install")


def test_hosts_that_tokenise_have_to_share_the_root() -> None:
    unshared = reply(dict.fromkeys(HOSTS, with_("resources", nonce="")))
    found = [each for each in judge(unshared, TOKENISING, SOFTWARE, NONCE).findings if each.is_problem]
    assert [each.check for each in found] == ["root"]
    assert "share no storage with the head, but shards.executor is dask. Mount /shared/t5 on every" in found[0].text
    assert not [each for each in judge(unshared, REQUIREMENTS, SOFTWARE, NONCE).findings if each.is_problem]


def test_a_node_reports_whether_it_has_dask_only_if_the_run_asks_for_it() -> None:
    assert DASK in software(recipe("smoke", ON_HOSTS).model_dump_json()).packages
    assert DASK not in software(recipe("smoke").model_dump_json()).packages


def test_without_a_hostfile_there_are_no_hosts_to_tokenise_on() -> None:
    with pytest.raises(SpecError, match=r"shards\.executor is dask, but cluster\.hostfile is not set: give --hostfile"):
        recipe("smoke", {"shards.executor": "dask"})
