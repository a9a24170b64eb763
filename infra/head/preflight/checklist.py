"""All checks, in the order in which they are shown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infra.head.preflight import agreement, capacity, compilation, storage_checks
from infra.head.preflight import agreement as agreement_module
from infra.head.preflight.findings import Finding, Heards
from infra.head.preflight.launch_requirements import Needs
from infra.head.preflight.rendezvous import Meeting, hostnames, meeting
from infra.head.preflight.storage_checks import Storage
from infra.node.inspection.facts import Software
from t5train.errors import HostError, HostKeyMismatch, HostMisconfigured, PreflightError, RemoteFailed

REACHABLE, HOST_KEY, PROGRAM, LAUNCHER, ALL_REDUCE = "reachable", "host key", "program", "launcher", "all-reduce"
HOSTNAME, ADDRESS, PORT, IN_USE = "hostname", "address", "port", "in use"
CHECKS = {
    LAUNCHER: "the head has what starts ranks",
    REACHABLE: "every host answers by ssh",
    HOST_KEY: "every host shows the key that is known of it",
    PROGRAM: "this package runs on every host",
    "machines": "every name is a machine of its own",
    HOSTNAME: "no host takes its own name for loopback",
    ADDRESS: "every host has a way to the first, where ranks meet",
    PORT: "nothing listens there",
    "python": "the same Python and kind of processor",
    "packages": "the same torch, deepspeed and what else ranks import",
    "runtime": "torch is built for the same accelerators",
    "code": "the head's code",
    "spec": "every host reads the run's settings alike",
    "accelerators": "as many as slots, of one kind",
    IN_USE: "nobody works on these accelerators",
    "ninja": "on the PATH that ranks have",
    "operators": "compiled, or a compiler is there",
    "compile locks": "none is left behind",
    "architectures": "DeepSpeed can read TORCH_CUDA_ARCH_LIST",
    "openmp": "torch's OpenMP library can be loaded",
    "root": "every host sees the head's, or none; and can write there, or to a disk of its own",
    "disks": "room where the run writes, and in the node folder",
    "memory": "enough for the ranks of each host",
    "shared memory": "enough of /dev/shm for the ranks of each host",
    "open files": "enough for connections to all ranks",
    "clock": "within 5 s of the head's",
    ALL_REDUCE: "all ranks meet and get the right sum",
}
"""Name of each check, and what holds when nothing is found."""


@dataclass(frozen=True)
class Judgement:
    """What was found, and where ranks can meet, if anywhere."""

    findings: list[Finding]
    meeting: Meeting | None
    port: int | None
    seen: Mapping[str, str]
    """Values worth showing of checks that found nothing, by check."""
    is_node_local: bool = False
    """Whether no host shares the head's storage."""


def judge(heards: Heards, needs: Needs, head: Software, nonce: str, machine: str = "") -> Judgement:
    """Everything that can be known from the facts of hosts that answered; the first host need not be among them.

    ``head`` is the software of the head, which wrote the ``nonce``, and ``machine`` its identity.
    """
    found = Storage.of(heards, nonce, machine)
    place, about_meeting = _place(heards, needs)
    remarks = {
        "operators": compilation.operators_to_compile(heards, needs),
        "compile locks": compilation.cleared_locks(heards),
        "root": storage_checks.remark(found),
    }
    findings = [
        *(Finding(check, text) for check, texts in _problems(heards, needs, head, found).items() for text in texts),
        *(Finding(check, text, is_problem=False) for check, texts in remarks.items() for text in texts),
        *about_meeting,
        *_hostnames(heards, place),
    ]
    port = heards[needs.first].facts.network.port if needs.first in heards else None
    return Judgement(findings, place, port, _seen(heards, place, port), found.is_node_local)


def _seen(heards: Heards, place: Meeting | None, port: int | None) -> dict[str, str]:
    seen = {REACHABLE: f"{len(heards)} of them"}
    if place is not None:
        seen |= {ADDRESS: f"{place.address}, by {', '.join(sorted(set(place.interfaces.values())))}", PORT: str(port)}
    if heards:
        facts = next(iter(heards.values())).facts
        software, packages = facts.software, facts.software.packages
        seen |= {"python": f"{software.python}, {software.machine}", "accelerators": facts.devices.kind}
        seen["packages"] = f"{packages.get('torch')}, {packages.get('deepspeed')}"
    return seen


def of_error(error: HostError) -> Finding:
    """About a host that did not answer."""
    kinds = {HostKeyMismatch: HOST_KEY, RemoteFailed: PROGRAM}
    can_pass = bool(error.hosts) and error.retryable and not isinstance(error, HostMisconfigured)
    return Finding(kinds.get(type(error), REACHABLE), str(error), hosts=error.hosts, can_pass=can_pass)


def _problems(heards: Heards, needs: Needs, head: Software, found: Storage) -> Mapping[str, Iterator[str]]:
    return {
        "machines": agreement.distinct_machines(heards),
        PORT: _port(heards, needs),
        "python": agreement.same_python(heards, head),
        "packages": agreement.same_packages(heards, head),
        "runtime": agreement.same_runtime(heards),
        "code": agreement.same_code(heards, head, needs.code is not None),
        "spec": agreement.same_spec(heards, head),
        "accelerators": _accelerators(heards, needs),
        IN_USE: capacity.accelerators_in_use(heards),
        "ninja": compilation.ninja(heards),
        "operators": compilation.operators(heards, needs),
        "compile locks": compilation.foreign_locks(heards),
        "architectures": compilation.architectures(needs),
        "openmp": compilation.openmp(heards, needs),
        "root": storage_checks.problems(heards, needs, found),
        "disks": storage_checks.disks(heards, needs, found),
        "memory": capacity.memory(heards, needs),
        "shared memory": capacity.shared_memory(heards, needs),
        "open files": capacity.open_files(heards, needs),
        "clock": agreement_module.clocks(heards),
    }


def _accelerators(heards: Heards, needs: Needs) -> Iterator[str]:
    yield from agreement.same_accelerators(heards)
    yield from capacity.accelerators(heards, needs)


def _place(heards: Heards, needs: Needs) -> tuple[Meeting | None, list[Finding]]:
    if needs.first not in heards:
        return None, []
    machines = {heard.facts.identity: host for host, heard in reversed(list(heards.items()))}  # the first of two
    networks = {host: heards[host].facts.network for host in heards if host in machines.values()}
    try:
        return meeting(networks, needs.first, needs.master_address), []
    except PreflightError as error:
        return None, [Finding(ADDRESS, str(error))]


def _hostnames(heards: Heards, place: Meeting | None) -> Iterator[Finding]:
    """A name that means loopback is no problem where ranks are told the interface to take."""
    interfaces = place.interfaces if place else {}
    for host, text, is_mended in hostnames({host: heard.facts.network for host, heard in heards.items()}, interfaces):
        end = (
            f"ranks are told to use {interfaces[host]} instead"
            if is_mended
            else "give the name the host's own address in /etc/hosts there"
        )
        yield Finding(HOSTNAME, f"{host}: {text}: {end}", is_problem=not is_mended)


def _port(heards: Heards, needs: Needs) -> Iterator[str]:
    if needs.first in heards and not (network := heards[needs.first].facts.network).port_is_free:
        yield (
            f"{needs.first}: another program listens on port {network.port}: choose another cluster.master_port, or "
            "leave it out to have a free one found"
        )
