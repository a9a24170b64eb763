from dataclasses import replace

import pytest

from infra.head.preflight.rendezvous import Rendezvous, choose_rendezvous
from infra.node.inspection.facts import Network, Route
from t5train.errors import PreflightError
from tests.support.host_facts import network

TWO = {"node0": network(0), "node1": network(1)}


def changed(host: str, **changes: object) -> dict[str, Network]:
    return {**TWO, host: replace(TWO[host], **changes)}  # type: ignore[arg-type] # any field that a test changes


def test_the_rendezvous_is_at_the_address_that_the_heads_ssh_uses() -> None:
    assert choose_rendezvous(TWO, "node0") == Rendezvous("10.0.0.0", {"node0": "eth0", "node1": "eth0"})


def test_an_address_that_several_hosts_have_is_not_used() -> None:
    for ssh_address in ("172.17.0.1", "127.0.0.1", None):
        assert choose_rendezvous(changed("node0", ssh_address=ssh_address), "node0").address == "10.0.0.0"


def test_a_shared_network_is_preferred_to_a_routed_one() -> None:
    routed = changed(
        "node0", ssh_address=None, interfaces={"wan0": ["192.0.2.1/24"], "eth0": ["10.0.0.7/24"], "lo": ["127.0.0.1/8"]}
    )
    other = replace(routed["node1"], routes=[*routed["node1"].routes, Route("0.0.0.0/0", "eth0", 0)])
    assert choose_rendezvous({**routed, "node1": other}, "node0").address == "10.0.0.7"


def test_each_host_uses_the_interface_of_its_most_specific_and_cheapest_route() -> None:
    routes = [
        Route("0.0.0.0/0", "wan0", 0),
        Route("10.0.0.0/24", "slow0", 200),
        Route("10.0.0.0/24", "ib0", 100),
        Route("10.0.0.0/8", "other0", 0),
    ]
    found = choose_rendezvous(changed("node1", interfaces={"ib0": ["10.0.0.1/24"]}, routes=routes), "node0")
    assert found.interfaces == {"node0": "eth0", "node1": "ib0"}


def test_a_given_master_address_must_belong_to_the_first_host() -> None:
    given = changed("node0", master_addresses=["10.0.0.0"])
    assert choose_rendezvous(given, "node0", "master").address == "10.0.0.0"
    for resolved in ([], ["127.0.1.1"], ["10.0.0.1"]):
        with pytest.raises(PreflightError, match=r"'master'.*node0, the first host.*leave it out"):
            choose_rendezvous(changed("node0", master_addresses=resolved), "node0", "master")


def test_hosts_without_a_route_to_the_first_are_named() -> None:
    with pytest.raises(
        PreflightError, match=r"there is no route to any of its addresses from node1\. Put the hosts into one"
    ):
        choose_rendezvous(changed("node1", interfaces={"eth0": ["10.5.0.1/24"]}, routes=[]), "node0")


def test_a_single_host_uses_loopback() -> None:
    assert choose_rendezvous({"node0": network(0)}, "node0") == Rendezvous("127.0.0.1", {"node0": "lo"})


def test_ipv6_addresses_can_be_used() -> None:
    ipv6 = {
        f"node{number}": replace(
            network(number),
            ssh_address=None,
            interfaces={"lo": ["::1/128"], "ib0": [f"fd00::{number + 1}/64", f"fe80::{number + 1}/64"]},
            routes=[Route("fd00::/64", "ib0", 256), Route("fe80::/64", "ib0", 256)],
        )
        for number in (0, 1)
    }
    assert choose_rendezvous(ipv6, "node0") == Rendezvous("fd00::1", {"node0": "ib0", "node1": "ib0"})
