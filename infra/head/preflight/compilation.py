"""What DeepSpeed and torch load or compile on each host, and what would keep them from it."""

import re
from collections.abc import Iterator

from infra.head.preflight.findings import HostReplies, of_each
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.inspection.accelerators import CPU
from infra.node.inspection.facts import Facts

STATIC_TLS = "static TLS"
"""What the loader's complaint about thread-local storage has in it."""
_ARCHITECTURE = re.compile(r"[0-9]+\.[0-9]+(\+PTX)?")


def ninja(replies: HostReplies) -> Iterator[str]:
    """DeepSpeed asks for it even when every operator is compiled."""
    remedy = "not on the PATH that sshd gives: pip install ninja there, or put it into /usr/bin"
    yield from of_each(replies, lambda _, facts: None if facts.build.ninja else f"ninja is {remedy}")


def operators(replies: HostReplies, needs: LaunchRequirements) -> Iterator[str]:
    """Compiled, or a compiler."""

    def complaint(_: str, facts: Facts) -> str | None:
        missing = sorted(set(needs.operators) - set(facts.build.compiled))
        if not missing or facts.build.compiler:
            return None
        return f"{', '.join(missing)} is not compiled, and there is no C++ compiler: install g++ there"

    yield from of_each(replies, complaint)


def operators_to_compile(replies: HostReplies, needs: LaunchRequirements) -> Iterator[str]:
    """What costs time at the start, and no more."""

    def remark(_: str, facts: Facts) -> str | None:
        missing = sorted(set(needs.operators) - set(facts.build.compiled))
        if not missing or not facts.build.compiler:
            return None
        return f"compiles {', '.join(missing)} when its ranks start, which takes about a minute each"

    yield from of_each(replies, remark)


def foreign_locks(replies: HostReplies) -> Iterator[str]:
    """Which a rank might wait for until it is removed, which only their owner can."""

    def complaint(_: str, facts: Facts) -> str | None:
        locks = facts.build.foreign_locks
        if not locks:
            return None
        return f"{', '.join(locks)} of another user: have that user remove it, or set TORCH_EXTENSIONS_DIR"

    yield from of_each(replies, complaint)


def cleared_locks(replies: HostReplies) -> Iterator[str]:
    """Which a rank would have waited for, for ever."""

    def remark(_: str, facts: Facts) -> str | None:
        cleared, shared = facts.build.cleared_locks, facts.build.shared_locks
        if shared:
            return (
                f"{', '.join(shared)} is on a disk that other machines may use, and ranks wait for it: if nobody "
                "compiles there, remove it, or unset TORCH_EXTENSIONS_DIR"
            )
        return f"removed {', '.join(cleared)}, left behind by a compile that was killed" if cleared else None

    yield from of_each(replies, remark)


def architectures(needs: LaunchRequirements) -> Iterator[str]:
    """What DeepSpeed can make of the variable: it compares numbers, and knows neither 9.0a nor Hopper."""
    given = needs.environment.get("TORCH_CUDA_ARCH_LIST", "")
    wrong = [name for name in given.replace(";", " ").split() if not _ARCHITECTURE.fullmatch(name)]
    if wrong and needs.accelerator != CPU:
        yield (
            f"TORCH_CUDA_ARCH_LIST is {given!r}: DeepSpeed cannot read {', '.join(wrong)}; write versions such as "
            "'8.0;9.0+PTX', or unset it"
        )


def openmp(replies: HostReplies, needs: LaunchRequirements) -> Iterator[str]:
    """Torch's OpenMP library, where the loader has no room left for it and ranks do not load it first of all."""
    if "libgomp" in needs.environment.get("LD_PRELOAD", ""):
        return

    def complaint(_: str, facts: Facts) -> str | None:
        error = facts.software.libgomp_error or (facts.devices.error if STATIC_TLS in facts.devices.error else "")
        return f"{error}: set LD_PRELOAD to that library, and name LD_PRELOAD in cluster.environment" if error else None

    yield from of_each(replies, complaint)
