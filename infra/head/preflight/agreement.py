"""Checks that all hosts have the same versions, code and time, and that they are distinct machines."""

from collections.abc import Callable, Iterator

from infra.head.preflight.findings import HostReplies, names, outliers
from infra.node.inspection.facts import Facts, Software
from infra.node.inspection.software import DASK, PACKAGES, SCORING, WANDB

_DIGITS = 12


def distinct_machines(replies: HostReplies) -> Iterator[str]:
    """Host names that refer to the same machine."""
    by_identity: dict[str, list[str]] = {}
    for host, reply in replies.items():
        by_identity.setdefault(reply.facts.identity, []).append(host)
    for hosts in by_identity.values():
        if len(hosts) > 1:
            yield (
                f"{names(hosts)}: these names refer to the same machine. Keep one of them in the hostfile, with all "
                "its slots"
            )


def same_python(replies: HostReplies, head: Software) -> Iterator[str]:
    """Differing versions of Python, or kinds of processor. The head's version of Python breaks a tie."""
    yield from _differing(replies, "Python", lambda facts: facts.software.python, "Install {} there", head.python)
    yield from _differing(
        replies,
        "processor",
        lambda facts: facts.software.machine,
        "Leave the host out: all ranks of a run need the same kind of processor",
    )


def same_packages(replies: HostReplies, head: Software) -> Iterator[str]:
    """Differing versions of torch, DeepSpeed or other packages that ranks import. The head's versions break a tie."""
    for package in PACKAGES:
        values = {host: reply.facts.software.packages.get(package, "") for host, reply in replies.items()}
        for hosts, value, rest, right in outliers(values, head.packages.get(package)):
            remedy = f"Install {package}=={right}" if right else f"Remove {package}"
            yield f"{names(hosts)}: {package} {value or 'missing'}, {rest} have {right or 'none'}. {remedy} there"


def same_dask(replies: HostReplies, head: Software) -> Iterator[str]:
    """Versions of the package distributed, with which hosts tokenise, that differ from the head's."""
    otherwise = "or set shards.executor=local"
    yield from _as_on_head(replies, head, DASK, "dask", "shards.executor is dask", otherwise)


def same_scoring(replies: HostReplies, head: Software) -> Iterator[str]:
    """Versions of the packages with which ranks score generated text that differ from the head's."""
    why, otherwise = "evaluate.best_metric is a score of generated text", "or set evaluate.best_metric=validation_loss"
    for package in SCORING:
        yield from _as_on_head(replies, head, package, "score", why, otherwise)


def _as_on_head(
    replies: HostReplies, head: Software, package: str, extra: str, why: str, otherwise: str
) -> Iterator[str]:
    """Hosts that lack the head's version of a package of an extra. Nothing if the spec does not ask for it."""
    right = head.packages.get(package)
    if right == "":
        yield f"{package} missing on this machine, but {why}. Install t5-pretrain[{extra}], {otherwise}"
    elif right is not None:
        values = {host: reply.facts.software.packages.get(package, "") for host, reply in replies.items()}
        for value in sorted({*values.values()} - {right}):
            hosts = [host for host, its in values.items() if its == value]
            yield (
                f"{names(hosts)}: {package} {value or 'missing'}, the head has {right}, and {why}. "
                f"Install t5-pretrain[{extra}] with {package}=={right} there, {otherwise}"
            )


def same_runtime(replies: HostReplies) -> Iterator[str]:
    """Differing accelerator runtimes that torch was built for."""

    def runtime(facts: Facts) -> str:
        built = sorted(facts.software.runtime.items())
        return ", ".join(f"{name} {version}" for name, version in built) or "the CPU only"

    yield from _differing(replies, "torch built for", runtime, "Install the same build of torch there")


def same_accelerators(replies: HostReplies) -> Iterator[str]:
    """Differing kinds of accelerators that torch detects."""
    remedy = "Repair the driver there, or leave the host out"
    yield from _differing(replies, "accelerator", lambda facts: facts.devices.kind, remedy)


def same_code(replies: HostReplies, head: Software, is_sent: bool) -> Iterator[str]:
    """Code of this package that differs from the head's. If code ``is_sent``, it was verified just before."""
    remedy = (
        "Another copy takes precedence over the one that was sent. Remove it from Python's site-packages there"
        if is_sent
        else "Install the head's version of this package there, or have it sent with --ship-code"
    )
    yield from _unlike_head(replies, "code", lambda facts: facts.software.code_digest, head.code_digest, remedy)


def same_spec(replies: HostReplies, head: Software) -> Iterator[str]:
    """Settings of the run that a node's code reads differently from the head's."""
    remedy = "Install the head's code and the head's version of pydantic there"
    yield from _unlike_head(replies, "settings", lambda facts: facts.software.spec_digest, head.spec_digest, remedy)


def _differing(
    replies: HostReplies, what: str, value_of: Callable[[Facts], str], remedy: str, preferred: str | None = None
) -> Iterator[str]:
    values = {host: value_of(reply.facts) for host, reply in replies.items()}
    for hosts, value, rest, right in outliers(values, preferred):
        yield f"{names(hosts)}: {what} {value}, {rest} have {right}. {remedy.format(right)}"


def _unlike_head(
    replies: HostReplies, what: str, digest_of: Callable[[Facts], str], head: str, remedy: str
) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for host, reply in replies.items():
        if (digest := digest_of(reply.facts)) != head:
            groups.setdefault(digest, []).append(host)
    for digest, hosts in groups.items():
        shown = digest if digest.startswith("refused") else digest[:_DIGITS]
        yield f"{names(hosts)}: {what} {shown}, the head has digest {head[:_DIGITS]}. {remedy}"


def wandb(first: str, replies: HostReplies) -> Iterator[str]:
    """A missing package wandb on the host of rank 0, which sends the metrics, if the spec asks for it.

    It stops no run: a host that takes over at night may lack it.
    """
    if first in replies and replies[first].facts.software.packages.get(WANDB) == "":
        yield (
            f"{first}: wandb missing, but monitor.wandb is true, so W&B gets no metrics. Install it there (python -m "
            "pip install wandb)"
        )


_CLOCK_SECONDS = 5.0


def clocks(replies: HostReplies) -> Iterator[str]:
    """Clocks that differ from the head's.

    A node reads its clock between the question and the answer, so a slow network does not cause a finding.
    """
    for host, reply in replies.items():
        behind = reply.asked_at - reply.facts.started_at
        ahead = reply.facts.ended_at - reply.answered_at
        if max(behind, ahead) > _CLOCK_SECONDS:
            by = f"{behind:.0f} s behind" if behind > ahead else f"{ahead:.0f} s ahead of"
            yield f"{host}: its clock is at least {by} the head's. Synchronize it with NTP or chrony"
