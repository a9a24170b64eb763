"""All checks, in the order in which they are shown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from infra.head.preflight import agreement, capacity, compilation, storage_checks
from infra.head.preflight import agreement as agreement_module
from infra.head.preflight.findings import Finding, HostReplies
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.rendezvous import Meeting, hostnames, meeting
from infra.head.preflight.storage_checks import Storage
from infra.node.inspection.facts import Software
from t5train.errors import HostError, HostKeyMismatch, HostMisconfigured, PreflightError, ProtocolMismatch, RemoteFailed

REACHABLE, HOST_KEY, PROGRAM, LAUNCHER, ALL_REDUCE = "reachable", "host key", "program", "launcher", "all-reduce"
HOSTNAME, ADDRESS, PORT, IN_USE = "hostname", "address", "port", "in use"
CHECKS = {
    LAUNCHER: "the launcher is installed on the head",
    REACHABLE: "every host answers over ssh",
    HOST_KEY: "every host presents its known key",
    PROGRAM: "this package runs on every host",
    "machines": "every name is a different machine",
    HOSTNAME: "no host resolves its own name to loopback",
    ADDRESS: "every host has a route to the first, which hosts the rendezvous",
    PORT: "the port of the rendezvous is free",
    "python": "the same Python and kind of processor",
    "packages": "the same torch, deepspeed and other packages that ranks import",
    "runtime": "torch is built for the same accelerators",
    "code": "the same code as the head",
    "spec": "every host reads the same settings of the run",
    "accelerators": "one for each slot, all of the same kind",
    IN_USE: "no other program uses these accelerators",
    "ninja": "on the PATH of ranks",
    "operators": "compiled, or a compiler is available",
    "compile locks": "none is left behind",
    "architectures": "DeepSpeed can read TORCH_CUDA_ARCH_LIST",
    "openmp": "torch's OpenMP library can be loaded",
    "root": "every host shares the head's or none does, and every host can write there or to its own disk",
    "disks": "enough disk space where the run writes, and in the node folder",
    "memory": "enough for the ranks of each host",
    "shared memory": "enough of /dev/shm for the ranks of each host",
    "open files": "enough for connections to all ranks",
    "clock": "within 5 s of the head's",
    ALL_REDUCE: "all ranks join and get the right sum",
}
"""Each check, and what holds if it has no findings."""


@dataclass(frozen=True)
class Judgement:
    """The findings, and the rendezvous of the ranks, if there is one."""

    findings: list[Finding]
    meeting: Meeting | None
    port: int | None
    seen: Mapping[str, str]
    """Values to show for checks without findings, by check."""
    is_node_local: bool = False
    """Whether no host shares the head's storage."""


def judge(replies: HostReplies, needs: LaunchRequirements, head: Software, nonce: str, machine: str = "") -> Judgement:
    """Run all checks on the facts of the hosts that answered, even if the first host of the launch did not.

    ``head`` is the software on the head, and ``machine`` the head's identity. ``nonce`` is what the head wrote to a
    file under the root, to see which hosts share it.
    """
    found = Storage.of(replies, nonce, machine)
    place, about_meeting = _place(replies, needs)
    remarks = {
        "operators": compilation.operators_to_compile(replies, needs),
        "compile locks": compilation.cleared_locks(replies),
        "root": storage_checks.remark(found),
    }
    findings = [
        *(Finding(check, text) for check, texts in _problems(replies, needs, head, found).items() for text in texts),
        *(Finding(check, text, is_problem=False) for check, texts in remarks.items() for text in texts),
        *about_meeting,
        *_hostnames(replies, place),
    ]
    port = replies[needs.first].facts.network.port if needs.first in replies else None
    return Judgement(findings, place, port, _seen(replies, place, port), found.is_node_local)


def _seen(replies: HostReplies, place: Meeting | None, port: int | None) -> dict[str, str]:
    seen = {REACHABLE: f"{len(replies)} hosts"}
    if place is not None:
        seen |= {ADDRESS: f"{place.address}, over {', '.join(sorted(set(place.interfaces.values())))}", PORT: str(port)}
    if replies:
        facts = next(iter(replies.values())).facts
        software, packages = facts.software, facts.software.packages
        seen |= {"python": f"{software.python}, {software.machine}", "accelerators": facts.devices.kind}
        seen["packages"] = f"{packages.get('torch')}, {packages.get('deepspeed')}"
    return seen


def of_error(error: HostError) -> Finding:
    """Return the finding about a host that did not answer."""
    kinds = {HostKeyMismatch: HOST_KEY, RemoteFailed: PROGRAM, ProtocolMismatch: PROGRAM}
    can_pass = bool(error.hosts) and error.retryable and not isinstance(error, HostMisconfigured)
    return Finding(kinds.get(type(error), REACHABLE), str(error), hosts=error.hosts, can_pass=can_pass)


def _problems(
    replies: HostReplies, needs: LaunchRequirements, head: Software, found: Storage
) -> Mapping[str, Iterator[str]]:
    return {
        "machines": agreement.distinct_machines(replies),
        PORT: _port(replies, needs),
        "python": agreement.same_python(replies, head),
        "packages": agreement.same_packages(replies, head),
        "runtime": agreement.same_runtime(replies),
        "code": agreement.same_code(replies, head, needs.code is not None),
        "spec": agreement.same_spec(replies, head),
        "accelerators": _accelerators(replies, needs),
        IN_USE: capacity.accelerators_in_use(replies),
        "ninja": compilation.ninja(replies),
        "operators": compilation.operators(replies, needs),
        "compile locks": compilation.foreign_locks(replies),
        "architectures": compilation.architectures(needs),
        "openmp": compilation.openmp(replies, needs),
        "root": storage_checks.problems(replies, needs, found),
        "disks": storage_checks.disks(replies, needs, found),
        "memory": capacity.memory(replies, needs),
        "shared memory": capacity.shared_memory(replies, needs),
        "open files": capacity.open_files(replies, needs),
        "clock": agreement_module.clocks(replies),
    }


def _accelerators(replies: HostReplies, needs: LaunchRequirements) -> Iterator[str]:
    yield from agreement.same_accelerators(replies)
    yield from capacity.accelerators(replies, needs)


def _place(replies: HostReplies, needs: LaunchRequirements) -> tuple[Meeting | None, list[Finding]]:
    if needs.first not in replies:
        return None, []
    machines = {reply.facts.identity: host for host, reply in reversed(list(replies.items()))}  # the first of two names
    networks = {host: replies[host].facts.network for host in replies if host in machines.values()}
    try:
        return meeting(networks, needs.first, needs.master_address), []
    except PreflightError as error:
        return None, [Finding(ADDRESS, str(error))]


def _hostnames(replies: HostReplies, place: Meeting | None) -> Iterator[Finding]:
    """A hostname that resolves to loopback is not a problem if ranks get the name of the interface to use."""
    interfaces = place.interfaces if place else {}
    for host, text, is_mended in hostnames({host: reply.facts.network for host, reply in replies.items()}, interfaces):
        end = (
            f"Ranks will use {interfaces[host]} instead"
            if is_mended
            else "Map the name to the host's own address in /etc/hosts there"
        )
        yield Finding(HOSTNAME, f"{host}: {text}. {end}", is_problem=not is_mended)


def _port(replies: HostReplies, needs: LaunchRequirements) -> Iterator[str]:
    if needs.first in replies and not (network := replies[needs.first].facts.network).port_is_free:
        yield (
            f"{needs.first}: another program listens on port {network.port}. Choose another cluster.master_port, or "
            "leave it out to use a free port"
        )
