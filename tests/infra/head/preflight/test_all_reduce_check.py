"""The all-reduce check, with ranks on this machine as if it were two hosts, and whom it blames for failures."""

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.head.preflight.all_reduce_check import Outcome, all_reduce, judge_outcomes
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.rendezvous import Rendezvous
from infra.node import ports, processes
from infra.node.inspection.all_reduce import Stage, unreachable

REQUIREMENTS = LaunchRequirements(slots={"near": (0,), "far": (0,)}, root=Path("/"), accelerator="cpu")
Ranks = Callable[[], set[int]]
HERE = Rendezvous("127.0.0.1", {"near": "lo", "far": "lo"})


class Here:
    """Every host is this machine."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - the same for all
        return list(argv)


class FarStartsNoRank(Here):
    """Every host is this machine, but host ``far`` starts no rank."""

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        return ["echo", '{"Probed": {"ranks": []}}'] if host == "far" else list(argv)


def judged(*outcomes: tuple[str, str, str]) -> list[str]:
    rendezvous = Rendezvous("10.0.0.1", {"node0": "eth1", "node1": "eth1"})
    found = {rank: Outcome(one[0], Stage(one[1]), one[2]) for rank, one in enumerate(outcomes)}
    return list(judge_outcomes(found, 60, rendezvous))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Ranks of this test's probes that still run."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv("T5_TEST", mark)

    def belongs(pid: int) -> bool:
        try:
            environment, argv = (Path(f"/proc/{pid}/{what}").read_bytes() for what in ("environ", "cmdline"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return mark.encode() in environment and b"infra.node.inspection.all_reduce" in argv

    return lambda: processes.find(belongs)


@pytest.mark.slow
def test_ranks_of_two_hosts_connect_and_agree_on_the_sum(ranks: Ranks) -> None:
    assert list(all_reduce(REQUIREMENTS, Here(), HERE, ports.free_port())) == []
    assert not ranks()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_at_once_and_no_rank_is_left(ranks: Ranks) -> None:
    three = LaunchRequirements(slots={"near": (0,), "far": (0, 1)}, root=Path("/"), accelerator="cpu")
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: list(all_reduce(three, Here(), HERE, ports.free_port())))
        while len(victims := ranks()) < 3:
            assert not found.done(), "within its deadline"
            time.sleep(0.01)
        killed_at = time.monotonic()
        os.kill(max(victims), signal.SIGKILL)
        (text,) = found.result()
    assert text.endswith("ended by signal 9")
    assert time.monotonic() - killed_at < 30
    assert not ranks()


@pytest.mark.slow
def test_ranks_that_wait_for_a_missing_rank_are_ended_at_the_deadline(ranks: Ranks) -> None:
    (text,) = all_reduce(REQUIREMENTS, FarStartsNoRank(), HERE, ports.free_port(), deadline_seconds=6)
    assert text.startswith("near: rank 0 timed out after 6 s waiting for ")
    assert not ranks()


@pytest.mark.slow
def test_a_port_that_was_taken_in_the_meantime_is_reported() -> None:
    single_host = LaunchRequirements(slots={"near": (0,)}, root=Path("/"), accelerator="cpu")
    with socket.create_server(("127.0.0.1", 0)) as other:
        (text,) = all_reduce(single_host, Here(), HERE, other.getsockname()[1])
    assert text.startswith("near: rank 0: ")
    assert "EADDRINUSE" in text


def test_ranks_that_others_wait_for_are_named() -> None:
    (text,) = judged(("node0", "imported", ""), ("node1", "reached", ""), ("node1", "reached", ""))
    assert text.startswith("node1: ranks 1, 2 timed out after 60 s waiting for torch to be imported. Check whether")


def test_the_network_is_suspected_if_all_ranks_hang_at_the_same_stage() -> None:
    (text,) = judged(("node0", "imported", ""), ("node1", "imported", ""))
    assert text.startswith("node0, node1: ranks 0, 1 timed out after 60 s waiting for all ranks to join. Check wh")


def test_the_mtu_is_suspected_if_small_messages_pass_and_large_ones_do_not() -> None:
    (text,) = judged(("node0", "exchanged", ""), ("node1", "exchanged", ""))
    assert text == (
        "node0, node1: ranks 0, 1 timed out after 60 s waiting for the sum of 1 MiB, although a small message passed. "
        "Suspect the MTU: a switch or tunnel between the hosts may drop large packets. Test it on another host than "
        "the first: `ping -c 3 -M do -s $(($(cat /sys/class/net/eth1/mtu) - 28)) 10.0.0.1`. If there is no answer, "
        "lower the MTU of that interface on all hosts, or raise it in the network"
    )
    outcomes = {rank: Outcome(f"node{rank}", Stage.EXCHANGED, "") for rank in (0, 1)}
    (text,) = judge_outcomes(outcomes, 60, Rendezvous("fd00::1", {"node0": "eth1", "node1": "eth1"}))
    assert "/mtu) - 48)) fd00::1`" in text


def test_failures_that_follow_from_the_first_are_not_reported() -> None:
    assert judged(("node0", "summed", ""), ("node1", "summed", "")) == []
    (text,) = judged(("node0", "joined", "RuntimeError: Connection closed by peer"), ("node1", "started", "no route"))
    assert text == "node1: rank 1: no route"


def test_a_host_is_reachable_if_nothing_listens_on_the_port_yet_but_not_without_a_route() -> None:
    assert unreachable("255.255.255.255", 1)
    assert unreachable("127.0.0.1", ports.free_port()) == ""
