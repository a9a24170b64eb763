"""Which error is raised for a failed attempt, and which hosts are blamed, given all that was observed."""

import random

import pytest

from infra.head.launch.verdict import Evidence, Hops, verdict
from t5train.errors import (
    CollectiveTimeout,
    DiskFull,
    HostLost,
    LaunchError,
    Preempted,
    RankKilled,
    RankStopped,
    T5TrainError,
)

HOSTS = ("a", "b", "c")


def evidence(kind: type[T5TrainError], what: str, hops: Hops, at: str = "", blames: bool = True) -> Evidence:
    """Evidence that a host gave, whose name is the first word of ``what``."""
    return Evidence(kind(what), hops, at, (what.partition(" ")[0],) if blames else ())


def killed(host: str, at: str = "10:00:05") -> Evidence:
    return evidence(RankKilled, f"{host} killed", Hops.OWN, at)


def full(host: str, at: str = "10:00:05") -> Evidence:
    return evidence(DiskFull, f"{host} full", Hops.OWN, at)


def restarted(host: str) -> Evidence:
    return evidence(HostLost, f"{host} restarted", Hops.OWN, "10:00:05")


def lost(host: str) -> Evidence:
    return evidence(HostLost, f"{host} lost", Hops.LOST)


def silent(host: str) -> Evidence:
    return evidence(HostLost, f"{host} silent", Hops.SILENT)


def crashed(host: str, at: str = "10:00:05") -> Evidence:
    return evidence(LaunchError, f"{host} crashed", Hops.UNEXPLAINED, at)


def late(host: str, at: str = "10:00:05") -> Evidence:
    return evidence(RankStopped, f"{host} late", Hops.DEADLINE, at)


def without_head(host: str) -> Evidence:
    return evidence(HostLost, f"{host} without head", Hops.LOST, "10:01:00", blames=False)


def timed_out(host: str, at: str = "10:00:00") -> Evidence:
    return evidence(CollectiveTimeout, f"{host} timed out", Hops.WAITED, at, blames=False)


def disconnected(host: str, at: str = "10:00:00") -> Evidence:
    return evidence(LaunchError, f"{host} disconnected", Hops.LOST_PEER, at, blames=False)


def without_parent(host: str) -> Evidence:
    return evidence(LaunchError, f"{host} without parent", Hops.PARENT, "10:00:00", blames=False)


def preempted(host: str, at: str = "09:59:59") -> Evidence:
    return evidence(Preempted, f"{host} preempted", Hops.PREEMPTED, at, blames=False)


LAUNCHER = Evidence(LaunchError("launcher ended"), Hops.LAUNCHER)
# For each: what was observed, the evidence that is the cause, and the hosts to blame.
CASES: dict[str, tuple[list[Evidence], str, str]] = {
    "nothing but the launcher": ([], "launcher ended", ""),
    "two causes within 2 s": ([killed("b", "10:00:06"), full("a", "10:00:05"), disconnected("c")], "a full", "a"),
    "two causes within 2 s, the other first": ([killed("b", "10:00:04"), full("a", "10:00:05")], "b killed", "b"),
    "a silent host while another host's rank fails": ([silent("a"), killed("b"), disconnected("c")], "b killed", "b"),
    "a silent host while another host's rank exits": ([silent("a"), crashed("b"), disconnected("c")], "b crashed", "b"),
    "a lost host while another host's rank fails": ([lost("a"), killed("b"), disconnected("c")], "b killed", "b"),
    "a lost host, of which a rank says nothing clear": ([lost("a"), crashed("b"), late("c")], "a lost", "a"),
    "a silent host for which others wait": ([silent("a"), late("b"), timed_out("c")], "a silent", "a"),
    "a silent host when others were preempted": ([silent("a"), preempted("b")], "a silent", "a"),
    "a restarted host and ranks that lost it": ([restarted("a"), crashed("b", "10:00:00")], "a restarted", "a"),
    "a host that is silent when another was restarted": ([restarted("a"), silent("b")], "a restarted", "a b"),
    "several hosts were restarted": ([restarted("a"), restarted("b"), timed_out("c")], "a restarted", "a b"),
    "a silent host besides a lost one": ([silent("b"), lost("a"), timed_out("c")], "a lost", "a b"),
    "no host answers": ([silent("b"), lost("a"), silent("c"), timed_out("c")], "a lost", ""),
    "no host answers when they are ended": ([silent("b"), silent("a"), silent("c"), timed_out("c")], "b silent", ""),
    "no host answers, and a rank failed": ([lost("a"), lost("b"), lost("c"), killed("b")], "b killed", "b"),
    "a partition between hosts": ([timed_out("b", "10:00:01"), timed_out("a"), disconnected("c")], "a timed out", ""),
    "a partition from the head": ([lost("c"), timed_out("a"), timed_out("b"), without_head("c")], "c lost", "c"),
    "a suspended head": ([without_head("a"), crashed("b"), disconnected("c")], "a without head", ""),
    "a full disk beside timeouts": ([timed_out("a"), full("b"), timed_out("c"), disconnected("a")], "b full", "b"),
    "a full disk and a rank that was asked to end": ([preempted("a"), full("b")], "b full", "b"),
    "asked to end after another rank timed out": ([preempted("a"), timed_out("b")], "b timed out", ""),
    "all were preempted": ([preempted("b"), preempted("a", "09:59:58")], "a preempted", ""),
    "the same rank hangs as those that wait for it": ([late("a"), timed_out("b"), disconnected("c")], "a late", "a"),
    "ranks of several hosts are late": ([late("b"), late("a", "10:00:04")], "a late", ""),
    "ranks of several hosts crash, as with a fault in the code": ([crashed("a"), crashed("b")], "a crashed", ""),
    "two ranks of one host crash": ([crashed("a"), crashed("a"), disconnected("b")], "a crashed", "a"),
    "a launcher killed on a host": ([without_parent("a"), disconnected("b", "09:00:00")], "a without parent", ""),
    "a launcher that ends after its rank was late": ([without_parent("a"), late("a")], "a late", "a"),
}


@pytest.mark.parametrize(("observed", "cause", "blamed"), CASES.values(), ids=CASES.keys())
def test_the_nearest_and_earliest_evidence_is_the_cause_and_its_hosts_are_blamed(
    observed: list[Evidence], cause: str, blamed: str
) -> None:
    error = verdict([*observed, LAUNCHER], HOSTS)
    assert str(error).startswith(cause)
    assert type(error) is next(type(each.error) for each in [*observed, LAUNCHER] if str(each.error) == cause)
    assert error.hosts == tuple(blamed.split())
    times = [(each.hops, each.at) for each in observed]
    if len(set(times)) == len(times):
        shuffled = random.Random(0).sample([*observed, LAUNCHER], len(observed) + 1)
        assert str(verdict(shuffled, HOSTS)) == str(error)


def test_an_absent_host_is_named_in_any_case() -> None:
    observed = [killed("a"), silent("b"), lost("c"), LAUNCHER]
    assert str(verdict(observed, HOSTS)) == "a killed\nAlso seen, but not the cause: c lost; b silent"
    assert str(verdict(observed[1:], HOSTS)) == "c lost; b silent"
    assert str(verdict([silent("b"), timed_out("a"), LAUNCHER])) == "b silent. The other hosts reported: a timed out"


def test_if_all_hosts_are_absent_the_message_names_this_machines_network() -> None:
    assert "so check this machine and its network first" in str(verdict([lost("b"), lost("a"), LAUNCHER], ("a", "b")))
    assert str(verdict([lost("a"), LAUNCHER], ("a",))) == "a lost"
