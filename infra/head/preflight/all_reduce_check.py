"""Runs a small all-reduce over all ranks of a run, and finds the ranks that kept it from completing."""

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Transport
from infra.head.preflight.findings import names
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.rendezvous import Rendezvous
from infra.node.inspection.all_reduce import STAGES, EndProbe, Probe, Probed, Stage
from infra.node.ports import Endpoint
from t5train.errors import HostError

DEADLINE_SECONDS = 60.0
_ANSWER_SECONDS = 15.0  # added to the deadline, for ssh and for the node's work before and after
_SETTLE_SECONDS = 1.0  # after the first failure: others may be about to fail independently
_WAITED_FOR = {
    Stage.STARTED: "the first host's address to answer. Check whether a firewall drops connections to it",
    Stage.REACHED: "torch to be imported. Check whether the disk that holds it is slow, or the host is overloaded",
    Stage.IMPORTED: "all ranks to join. Check whether a firewall separates the hosts, or set cluster.master_address",
    Stage.JOINED: "the sum. Check whether a firewall or a broken cable separates the hosts",
}
"""What a rank waits for after each stage, and what to check if it never happens."""


@dataclass(frozen=True)
class Outcome:
    """How far a rank got."""

    host: str
    stage: Stage
    """The last stage that it reached."""
    error: str
    """Why it failed; empty if it did not fail, or was ended while it was waiting."""


def all_reduce(
    requirements: LaunchRequirements,
    transport: Transport,
    rendezvous: Rendezvous,
    port: int,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Iterator[str]:
    """Run an all-reduce with a process for each slot of each host. No findings if all get the right sum in time.

    As soon as a host fails, the ranks on all hosts are ended. No rank is left running, even after an exception.
    """
    run_id = f"preflight-{secrets.token_hex(4)}"
    nodes = Nodes(transport, tuple(requirements.slots), code=requirements.code, python=requirements.python)
    answers, ended = dict[str, Probed | HostError](), set[str]()

    def on_answer(host: str, answer: Probed | HostError) -> None:
        answers[host] = answer
        failed = isinstance(answer, HostError) or any(one.stage != Stage.SUMMED for one in answer.ranks)
        if failed and not ended:
            time.sleep(_SETTLE_SECONDS)
            ended.update(other for other in requirements.slots if other not in answers)
            _end(nodes.on(*ended), run_id)

    probes = dict(_probes(requirements, rendezvous, port, run_id, deadline_seconds))
    try:
        nodes.ask_each(probes, deadline_seconds + _ANSWER_SECONDS, on_answer=on_answer)
    finally:
        _end(nodes.on(*(host for host in requirements.slots if host not in answers)), run_id)
    return _findings(answers, ended, deadline_seconds, rendezvous)


def judge_outcomes(
    outcomes: Mapping[int, Outcome], deadline_seconds: float, rendezvous: Rendezvous | None = None
) -> Iterator[str]:
    """Report the ranks that failed by themselves, or if there are none, those that kept others waiting.

    In both cases, only the ranks that completed the fewest stages are reported.
    """
    failed = {rank: one for rank, one in outcomes.items() if one.error}
    if failed:
        for (host, error), ranks in _grouped(_least_far(failed)).items():
            yield f"{host}: {_ranks(ranks)}: {error}"
        return
    waiting = {rank: one for rank, one in outcomes.items() if one.stage != Stage.SUMMED}
    if late := _least_far(waiting):
        hosts = list(dict.fromkeys(one.host for one in late.values()))
        stage = next(iter(late.values())).stage
        what = _large_messages(rendezvous, hosts[-1]) if stage == Stage.EXCHANGED else _WAITED_FOR[stage]
        yield f"{names(hosts)}: {_ranks(list(late))} timed out after {deadline_seconds:g} s waiting for {what}"


def _large_messages(rendezvous: Rendezvous | None, host: str) -> str:
    address = rendezvous.address if rendezvous else "ADDRESS"
    interface = rendezvous.interfaces.get(host, "INTERFACE") if rendezvous else "INTERFACE"
    headers = 48 if ":" in address else 28
    return (
        "the sum of 1 MiB, although a small message passed. Suspect the MTU: a switch or tunnel between the hosts may "
        "drop large packets. Test it on another host than the first: `ping -c 3 -M do -s $(($(cat /sys/class/net/"
        f"{interface}/mtu) - {headers})) {address}`. If there is no answer, lower the MTU of that interface on all "
        "hosts, or raise it in the network"
    )


def _least_far(outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
    least = min((STAGES.index(one.stage) for one in outcomes.values()), default=0)
    return {rank: one for rank, one in outcomes.items() if STAGES.index(one.stage) == least}


def _probes(
    requirements: LaunchRequirements, rendezvous: Rendezvous, port: int, run_id: str, deadline_seconds: float
) -> Iterator[tuple[str, Probe]]:
    first_rank = 0
    for host, slots in requirements.slots.items():
        yield (
            host,
            Probe(
                run_id=run_id,
                rendezvous=Endpoint(rendezvous.address, port),
                interface=rendezvous.interfaces[host],
                num_ranks=requirements.num_ranks,
                first_rank=first_rank,
                slots=slots,
                accelerator=requirements.accelerator,
                environment=requirements.environment,
                deadline_seconds=deadline_seconds,
            ),
        )
        first_rank += len(slots)


def _end(nodes: Nodes, run_id: str) -> None:
    """End the ranks on these hosts. Hosts that do not answer end theirs at the deadline."""
    nodes.ask(EndProbe(run_id), _ANSWER_SECONDS)


def _outcomes(host: str, probed: Probed, was_ended: bool = False) -> dict[int, Outcome]:
    return {one.rank: Outcome(host, one.stage, _error(one.returncode, one.error, was_ended)) for one in probed.ranks}


def _error(returncode: int | None, error: str, was_ended: bool) -> str:
    if not returncode or (was_ended and returncode < 0):
        return ""
    return error or (f"ended by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}")


def _findings(
    answers: Mapping[str, Probed | HostError], ended: set[str], deadline_seconds: float, rendezvous: Rendezvous
) -> Iterator[str]:
    """If a host does not answer, ranks on other hosts wait for it, so nothing is reported about them."""
    outcomes: dict[int, Outcome] = {}
    for host, answer in answers.items():
        if isinstance(answer, HostError):
            yield str(answer)
        else:
            outcomes |= _outcomes(host, answer, host in ended)
    if not any(isinstance(answer, HostError) for answer in answers.values()):
        yield from judge_outcomes(outcomes, deadline_seconds, rendezvous)


def _grouped(outcomes: Mapping[int, Outcome]) -> dict[tuple[str, str], list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in outcomes.items():
        groups.setdefault((outcome.host, outcome.error), []).append(rank)
    return groups


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {names([str(rank) for rank in sorted(ranks)])}"
