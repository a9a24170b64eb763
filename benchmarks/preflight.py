"""Measure how the cost of preflight and of planning grows with the number of hosts, on simulated hosts.

    python -m benchmarks.preflight [--hosts 1 4 16 64 128] [--latency 0.3] [--rounds 5]

Preflight asks all hosts for their facts and evaluates the answers. Each host answers after ``latency`` seconds, as over
ssh. The all-reduce is left out. Then preflight runs on 64 hosts of which four have problems, and must report them.

Planning is the work of the head alone, with 8 ranks per host: read and choose hosts, make the launcher's command,
evaluate facts, and choose the rendezvous. Figures are medians of the rounds.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measured_result import Figure, add_into, measured_here
from infra.head.hosts.hostfile import hostfile_text, include_argument, parse, select
from infra.head.launch.deepspeed_launcher import launch_command
from infra.head.preflight.checklist import judge
from infra.head.preflight.findings import Finding, HostReply
from infra.head.preflight.host_preflight import survey
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.inspection.facts import Software
from infra.node.inspection.software import software
from t5train.spec import ClusterSpec
from tests.support.simulated_hosts import Fault, Simulated, facts_of, write_answers

SLOTS = 8
UNWELL = {
    1: Fault(change=lambda facts: replace(facts, software=_with_torch(facts.software, "2.12.0"))),
    2: Fault(change=lambda facts: replace(facts, build=replace(facts.build, ninja=None))),
    3: Fault(ssh_error="ssh: connect to host node003 port 22: Connection timed out", seconds=5.0),
    4: Fault(ssh_error="Host key verification failed."),
}
NAMED = {"packages": "node001", "ninja": "node002", "reachable": "node003", "host key": "node004"}


def main() -> None:
    """Print the table, and the problems found on the hosts that have any."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    arguments.add_argument("--latency", type=float, default=0.3)
    arguments.add_argument("--rounds", type=int, default=5)
    add_into(arguments)
    given = arguments.parse_args()
    surveys = [surveyed(number, given.latency, given.rounds) for number in given.hosts]
    plans = [planned(number, given.rounds) for number in given.hosts]
    notes = f"A simulated host answers {given.latency:g} s after it is asked."
    measured_here("Asking and judging hosts before a run", compared(surveys, plans), notes).show(given.into)
    seconds, found = unwell(64, given.latency)
    print(f"64 hosts, four of them not well, the slowest of which says nothing for 5 s: {seconds:.1f} s")
    for finding in found:
        print(f"  {finding.check}: {finding.text}")


def surveyed(number: int, latency_seconds: float, rounds: int) -> tuple[int, float, float]:
    """Return the number of hosts, and the head's seconds and CPU seconds to ask and check them."""
    needs = needs_of(number)
    walls, works = [], []
    with tempfile.TemporaryDirectory() as folder:
        needs = replace(needs, root=Path(folder))
        write_answers(Path(folder), facts_of(list(needs.slots), {}))
        for _ in range(rounds):
            at, work = time.perf_counter(), cpu_seconds()
            judged = survey(needs, Simulated(Path(folder), latency_seconds, {}))
            walls.append(time.perf_counter() - at)
            works.append(cpu_seconds() - work)
            assert not of_hosts(judged.findings), judged.findings
            assert judged.rendezvous is not None
    return number, statistics.median(walls), statistics.median(works)


def planned(number: int, rounds: int) -> tuple[int, float, float]:
    """Return the number of hosts, and the head's seconds and CPU seconds to plan a launch on them."""
    needs, text = needs_of(number), "".join(f"{name} slots={SLOTS}\n" for name in names(number))
    answers = facts_of(names(number), {})
    replies = {name: HostReply(facts, facts.started_at, facts.ended_at) for name, facts in answers.items()}
    head = software("")
    walls, works = [], []
    for _ in range(rounds):
        at, work = time.perf_counter(), cpu_seconds()
        hosts = select(parse(text, "hosts"), include=None, exclude=None, num_nodes=None)
        argv = launch_command(
            ClusterSpec(),
            hosts,
            Path("/var"),
            master=("10.0.0.1", 29500),
            program=("infra.node.attempts.process_guard",),
        )
        judged = judge(replies, needs, head, nonce="")
        walls.append(time.perf_counter() - at)
        works.append(cpu_seconds() - work)
        assert include_argument(hosts) in argv
        assert len(hostfile_text(hosts).splitlines()) == number
        assert judged.rendezvous is not None
    return number, statistics.median(walls), statistics.median(works)


def unwell(number: int, latency_seconds: float) -> tuple[float, list[Finding]]:
    """Return the seconds until the hosts with problems are named, and the findings about them."""
    faults = {names(number)[index]: fault for index, fault in UNWELL.items()}
    with tempfile.TemporaryDirectory() as folder:
        needs = replace(needs_of(number), root=Path(folder))
        write_answers(Path(folder), facts_of(list(needs.slots), faults))
        at = time.perf_counter()
        found = of_hosts(survey(needs, Simulated(Path(folder), latency_seconds, faults)).findings)
    assert {finding.check: finding.text.partition(":")[0] for finding in found} == NAMED
    return time.perf_counter() - at, found


def needs_of(number: int) -> LaunchRequirements:
    """Return the requirements of a launch of CPU ranks, eight on every host."""
    return LaunchRequirements(dict.fromkeys(names(number), tuple(range(SLOTS))), Path("/"), accelerator="cpu")


def names(number: int) -> list[str]:
    """Return host names: ``node000`` and so on."""
    return [f"node{index:03d}" for index in range(number)]


def of_hosts(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those about this machine: its launcher, limits and disk."""
    return [finding for finding in findings if finding.check not in {"launcher", "open files", "disks", "root"}]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its threads, without the simulated hosts."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compared(
    surveys: Sequence[tuple[int, float, float]], plans: Sequence[tuple[int, float, float]]
) -> list[dict[str, Figure]]:
    """Return what it takes to ask hosts and to plan a launch on them, by the number of hosts."""
    (_, first, _), *_ = surveys
    return [
        {
            "hosts": number,
            "ranks": number * SLOTS,
            "ask all and judge, s": round(seconds, 2),
            "relative to the fewest hosts": round(seconds / first, 1),
            "CPU of the head, s": round(worked, 3),
            "plan a launch, CPU ms": round(planning * 1e3, 1),
        }
        for (number, seconds, worked), (_, _, planning) in zip(surveys, plans, strict=True)
    ]


def _with_torch(of: Software, version: str) -> Software:
    return replace(of, packages=of.packages | {"torch": version})


if __name__ == "__main__":
    main()
