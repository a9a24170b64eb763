"""All checks, in the order in which they are shown."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from infra.head.preflight import agreement, host_checks, storage_checks
from infra.head.preflight.findings import Finding, HostReplies, of_each
from infra.head.preflight.host_checks import HostCheck
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.preflight.rendezvous import Rendezvous, choose_rendezvous, hostnames
from infra.head.preflight.storage_checks import Storage
from infra.node.inspection.facts import Software
from t5train.errors import HostError, HostKeyMismatch, PreflightError, ProtocolMismatch, RemoteFailed
from t5train.quantities import quantity

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
    "operators": "compiled, or a compiler is available, in a folder that can be written",
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


COLUMNS = ["check", "result", "what"]


@dataclass(frozen=True)
class Report:
    """The findings of all checks, and the rendezvous of the ranks, if there is one."""

    findings: list[Finding]
    rendezvous: Rendezvous | None
    port: int | None
    seen: Mapping[str, str]
    """Values to show for checks without findings, by check."""
    is_node_local: bool = False
    """Whether each host uses its own storage."""
    all_reduce_tried: bool = False
    """Whether the all-reduce was tried. It is skipped if there were problems before it."""

    @property
    def problems(self) -> list[Finding]:
        """Findings that prevent the hosts from training together."""
        return [finding for finding in self.findings if finding.is_problem]

    def rows(self) -> list[list[str]]:
        """Rows of a table with ``COLUMNS``: each finding, and a line for each check without findings."""
        rows = []
        for check, holds in CHECKS.items():
            seen = self.seen.get(check)
            found = [finding for finding in self.findings if finding.check == check]
            if check == ALL_REDUCE and not self.all_reduce_tried:
                rows.append([check, "not tried", "fix the problems above first"])
            elif not found:
                rows.append([check, "ok", f"{holds}: {seen}" if seen else holds])
            rows += [[check, "PROBLEM" if finding.is_problem else "note", finding.text] for finding in found]
        return rows


def judge(
    replies: HostReplies, requirements: LaunchRequirements, head: Software, nonce: str, machine: str = ""
) -> Report:
    """Run all checks on the facts of the hosts that answered, even if the first host of the launch did not.

    ``head`` is the software on the head, and ``machine`` the head's identity. ``nonce`` is what the head wrote to a
    file under the root, to see which hosts share it.
    """
    found = Storage.of(replies, nonce, machine)
    rendezvous, rendezvous_findings = _rendezvous(replies, requirements)
    each = _on_each(replies, requirements)
    remarks = {
        "operators": each(host_checks.operators_to_compile),
        "compile locks": each(host_checks.cleared_locks),
        "root": storage_checks.remark(found, requirements),
        "packages": agreement.wandb(requirements.first, replies),
    }
    problems = _problems(replies, requirements, head, found)
    findings = [
        *(Finding(check, text) for check, texts in problems.items() for text in texts),
        *(Finding(check, text, is_problem=False) for check, texts in remarks.items() for text in texts),
        *rendezvous_findings,
        *_hostnames(replies, rendezvous),
    ]
    port = replies[requirements.first].facts.network.port if requirements.first in replies else None
    return Report(findings, rendezvous, port, _seen(replies, rendezvous, port), found.is_node_local)


def _seen(replies: HostReplies, rendezvous: Rendezvous | None, port: int | None) -> dict[str, str]:
    seen = {REACHABLE: quantity(len(replies), "host")}
    if rendezvous is not None:
        seen |= {
            ADDRESS: f"{rendezvous.address}, over {', '.join(sorted(set(rendezvous.interfaces.values())))}",
            PORT: str(port),
        }
    if replies:
        facts = next(iter(replies.values())).facts
        software, packages = facts.software, facts.software.packages
        seen |= {"python": f"{software.python}, {software.machine}", "accelerators": facts.devices.kind}
        seen["packages"] = f"{packages.get('torch')}, {packages.get('deepspeed')}"
    return seen


def of_error(error: HostError) -> Finding:
    """Return the finding about a host that did not answer."""
    kinds = {HostKeyMismatch: HOST_KEY, RemoteFailed: PROGRAM, ProtocolMismatch: PROGRAM}
    kind = kinds.get(type(error), REACHABLE)
    return Finding(kind, str(error), hosts=error.hosts, is_transient=error.is_transient)


def _on_each(replies: HostReplies, requirements: LaunchRequirements) -> Callable[[HostCheck], Iterator[str]]:
    """Return a function that makes a check on each host."""
    return lambda check: of_each(replies, lambda host, facts: check(host, facts, requirements))


def _problems(
    replies: HostReplies, requirements: LaunchRequirements, head: Software, found: Storage
) -> Mapping[str, Iterable[str]]:
    each = _on_each(replies, requirements)
    dask = agreement.same_dask(replies, head) if requirements.tokenises else ()
    return {
        "machines": agreement.distinct_machines(replies),
        PORT: _port(replies, requirements),
        "python": agreement.same_python(replies, head),
        "packages": chain(agreement.same_packages(replies, head), agreement.same_scoring(replies, head), dask),
        "runtime": agreement.same_runtime(replies),
        "code": agreement.same_code(replies, head, requirements.code is not None),
        "spec": agreement.same_spec(replies, head),
        "accelerators": chain(agreement.same_accelerators(replies), each(host_checks.accelerators)),
        IN_USE: each(host_checks.accelerators_in_use),
        "ninja": each(host_checks.ninja),
        "operators": chain(each(host_checks.operators), each(host_checks.unwritable)),
        "compile locks": each(host_checks.foreign_locks),
        "architectures": host_checks.unknown_architectures(requirements),
        "openmp": each(host_checks.openmp),
        "root": chain(storage_checks.problems(replies, requirements, found), storage_checks.dask(requirements, found)),
        "disks": storage_checks.disks(replies, requirements, found),
        "memory": each(host_checks.memory),
        "shared memory": each(host_checks.shared_memory),
        "open files": each(host_checks.open_files),
        "clock": agreement.clocks(replies),
    }


def _rendezvous(replies: HostReplies, requirements: LaunchRequirements) -> tuple[Rendezvous | None, list[Finding]]:
    if requirements.first not in replies:
        return None, []
    machines = {reply.facts.identity: host for host, reply in reversed(list(replies.items()))}  # the first of two names
    networks = {host: replies[host].facts.network for host in replies if host in machines.values()}
    try:
        return choose_rendezvous(networks, requirements.first, requirements.master_address), []
    except PreflightError as error:
        return None, [Finding(ADDRESS, str(error))]


def _hostnames(replies: HostReplies, rendezvous: Rendezvous | None) -> Iterator[Finding]:
    """A hostname that resolves to loopback is not a problem if ranks get the name of the interface to use."""
    interfaces = rendezvous.interfaces if rendezvous else {}
    for host, text, is_fixed in hostnames({host: reply.facts.network for host, reply in replies.items()}, interfaces):
        end = (
            f"Ranks will use {interfaces[host]} instead"
            if is_fixed
            else "Map the name to the host's own address in /etc/hosts there"
        )
        yield Finding(HOSTNAME, f"{host}: {text}. {end}", is_problem=not is_fixed)


def _port(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    if requirements.first in replies and not (network := replies[requirements.first].facts.network).port_is_free:
        yield (
            f"{requirements.first}: another program listens on port {network.port}. Choose another "
            "cluster.master_port, or leave it out to use a free port"
        )
