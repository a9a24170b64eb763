"""Checks that DeepSpeed and torch can load or compile what they need on each host."""

import re
from collections.abc import Iterator

from infra.head.preflight.findings import HostReplies, of_each
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.compiled_operators import unwritable_text
from infra.node.inspection.accelerators import CPU
from infra.node.inspection.facts import Facts

STATIC_TLS = "static TLS"
"""Part of the loader's error message about thread-local storage."""
_ARCHITECTURE = re.compile(r"[0-9]+\.[0-9]+(\+PTX)?")


def ninja(replies: HostReplies) -> Iterator[str]:
    """Hosts without ninja. DeepSpeed needs it even if every operator is already compiled."""
    remedy = "not on the PATH that sshd sets. Run `pip install ninja` there, or put ninja into /usr/bin"
    yield from of_each(replies, lambda _, facts: None if facts.build.ninja else f"ninja is {remedy}")


def operators(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Hosts that lack a compiled operator and have no compiler."""

    def complaint(_: str, facts: Facts) -> str | None:
        missing = sorted(set(requirements.operators) - set(facts.build.compiled))
        if not missing or facts.build.compiler:
            return None
        return f"DeepSpeed's {', '.join(missing)} is not compiled, and there is no C++ compiler. Install g++ there"

    yield from of_each(replies, complaint)


def unwritable(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Folders of compiled operators that ranks cannot write. They write a lock there even if nothing is to compile."""

    def complaint(_: str, facts: Facts) -> str | None:
        if not requirements.operators or not facts.build.unwritable:
            return None
        return f"{unwritable_text(facts.build.unwritable)} and list it in cluster.environment"

    yield from of_each(replies, complaint)


def operators_to_compile(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Operators that ranks still have to compile, which only takes time at the start."""

    def remark(_: str, facts: Facts) -> str | None:
        missing = sorted(set(requirements.operators) - set(facts.build.compiled))
        if not missing or not facts.build.compiler:
            return None
        return f"compiles DeepSpeed's {', '.join(missing)} when its ranks start, which takes about a minute each"

    yield from of_each(replies, remark)


def foreign_locks(replies: HostReplies) -> Iterator[str]:
    """Compile locks of other users. A rank may wait until such a lock is removed, and only its owner can remove it."""

    def complaint(_: str, facts: Facts) -> str | None:
        locks = facts.build.foreign_locks
        if not locks:
            return None
        return (
            f"the compile lock {', '.join(locks)} belongs to another user. Ask that user to remove the lock, or set "
            "TORCH_EXTENSIONS_DIR to another folder"
        )

    yield from of_each(replies, complaint)


def cleared_locks(replies: HostReplies) -> Iterator[str]:
    """Compile locks that were removed, since ranks would wait for them forever, and locks that are on a shared disk."""

    def remark(_: str, facts: Facts) -> str | None:
        cleared, shared = facts.build.cleared_locks, facts.build.shared_locks
        if shared:
            return (
                f"ranks wait for the compile lock {', '.join(shared)}, on a disk that other machines may use. If no "
                "machine is compiling there, remove the lock, or unset TORCH_EXTENSIONS_DIR"
            )
        return f"removed {', '.join(cleared)}, left behind by a compile that was killed" if cleared else None

    yield from of_each(replies, remark)


def architectures(requirements: LaunchRequirements) -> Iterator[str]:
    """Names in TORCH_CUDA_ARCH_LIST that DeepSpeed cannot parse: it expects numbers, and rejects 9.0a and Hopper."""
    given = requirements.environment.get("TORCH_CUDA_ARCH_LIST", "")
    wrong = [name for name in given.replace(";", " ").split() if not _ARCHITECTURE.fullmatch(name)]
    if wrong and requirements.accelerator != CPU:
        yield (
            f"TORCH_CUDA_ARCH_LIST is {given!r}: DeepSpeed cannot read {', '.join(wrong)}. Use versions such as "
            "'8.0;9.0+PTX', or unset it"
        )


def openmp(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Hosts that cannot load torch's OpenMP library, usually for lack of static TLS, if ranks do not preload it."""
    if "libgomp" in requirements.environment.get("LD_PRELOAD", ""):
        return

    def complaint(_: str, facts: Facts) -> str | None:
        error = facts.software.libgomp_error or (facts.devices.error if STATIC_TLS in facts.devices.error else "")
        return f"{error}. Set LD_PRELOAD to that library, and list LD_PRELOAD in cluster.environment" if error else None

    yield from of_each(replies, complaint)
