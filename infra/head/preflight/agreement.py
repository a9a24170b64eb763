"""What must be the same on all hosts, such as versions and the time, and machines that must differ."""

from collections.abc import Callable, Iterator

from infra.head.preflight.findings import HostReplies, names, odd_ones
from infra.node.inspection.facts import Facts, Software
from infra.node.inspection.software import PACKAGES

_DIGITS = 12


def distinct_machines(replies: HostReplies) -> Iterator[str]:
    """Names that mean one machine."""
    by_identity: dict[str, list[str]] = {}
    for host, reply in replies.items():
        by_identity.setdefault(reply.facts.identity, []).append(host)
    for hosts in by_identity.values():
        if len(hosts) > 1:
            yield f"{names(hosts)}: names of one machine: keep one of them in the hostfile, with all its slots"


def same_python(replies: HostReplies, head: Software) -> Iterator[str]:
    """Versions of Python, and kinds of processor; the head's version breaks a tie."""
    yield from _differing(replies, "Python", lambda facts: facts.software.python, "install {} there", head.python)
    yield from _differing(
        replies, "processor", lambda facts: facts.software.machine, "leave it out: ranks of a run need one kind"
    )


def same_packages(replies: HostReplies, head: Software) -> Iterator[str]:
    """torch, DeepSpeed and what else ranks import; the head's versions break a tie."""
    for package in PACKAGES:
        values = {host: reply.facts.software.packages.get(package, "") for host, reply in replies.items()}
        for hosts, value, rest, right in odd_ones(values, head.packages.get(package)):
            remedy = f"install {package}=={right}" if right else f"remove {package}"
            yield f"{names(hosts)}: {package} {value or 'missing'}, {rest} {right or 'have none'}: {remedy} there"


def same_runtime(replies: HostReplies) -> Iterator[str]:
    """What torch was built for."""

    def runtime(facts: Facts) -> str:
        built = sorted(facts.software.runtime.items())
        return ", ".join(f"{name} {version}" for name, version in built) or "the CPU only"

    yield from _differing(replies, "torch built for", runtime, "install the same build of torch there")


def same_accelerators(replies: HostReplies) -> Iterator[str]:
    """The kind that torch finds."""
    remedy = "repair the driver there, or leave the host out"
    yield from _differing(replies, "accelerator", lambda facts: facts.devices.kind, remedy)


def same_code(replies: HostReplies, head: Software, is_sent: bool) -> Iterator[str]:
    """Our own modules, against the head's. What was sent was whole a moment ago."""
    remedy = (
        "another copy comes before the one that was sent: remove it from Python's site-packages there"
        if is_sent
        else "install the head's version of this package there, or have it sent with --ship-code"
    )
    yield from _unlike_head(replies, "code", lambda facts: facts.software.code_digest, head.code_digest, remedy)


def same_spec(replies: HostReplies, head: Software) -> Iterator[str]:
    """The run's settings, as each node's code reads them, against the head's."""
    remedy = "install the head's code and pydantic there"
    yield from _unlike_head(replies, "spec", lambda facts: facts.software.spec_digest, head.spec_digest, remedy)


def _differing(
    replies: HostReplies, what: str, value_of: Callable[[Facts], str], remedy: str, preferred: str | None = None
) -> Iterator[str]:
    values = {host: value_of(reply.facts) for host, reply in replies.items()}
    for hosts, value, rest, right in odd_ones(values, preferred):
        yield f"{names(hosts)}: {what} {value}, {rest} {right}: {remedy.format(right)}"


def _unlike_head(
    replies: HostReplies, what: str, digest_of: Callable[[Facts], str], head: str, remedy: str
) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for host, reply in replies.items():
        if (digest := digest_of(reply.facts)) != head:
            groups.setdefault(digest, []).append(host)
    for digest, hosts in groups.items():
        shown = digest if digest.startswith("refused") else digest[:_DIGITS]
        yield f"{names(hosts)}: {what} {shown}, the head's {head[:_DIGITS]}: {remedy}"


_CLOCK_SECONDS = 5.0


def clocks(replies: HostReplies) -> Iterator[str]:
    """Against the head's: the node looked at its clock between question and answer, whatever the way took."""
    for host, reply in replies.items():
        behind = reply.asked_at - reply.facts.started_at
        ahead = reply.facts.ended_at - reply.answered_at
        if max(behind, ahead) > _CLOCK_SECONDS:
            by = f"{behind:.0f} s behind" if behind > ahead else f"{ahead:.0f} s ahead of"
            yield f"{host}: its clock is at least {by} the head's: let NTP or chrony set it there"
