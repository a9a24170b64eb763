"""Checks of each host by itself: its accelerators, memory and open files, and whether DeepSpeed's operators are there.

A check takes the name of a host, its facts and the requirements. It returns what is wrong, without the name, or None.
"""

import re
from collections.abc import Callable

from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.attempts.shared_memory import FreeSpace, shortage
from infra.node.compiled_operators import unwritable_text
from infra.node.inspection.facts import Facts
from infra.node.inspection.hardware import CPU
from t5train.quantities import format_bytes, quantity

HostCheck = Callable[[str, Facts, LaunchRequirements], str | None]
_IN_USE_BYTES = 2 * 10**9  # drivers, displays and our own inspection use less
_FILES, _FILES_A_RANK = 512, 8
_STATIC_TLS = "static TLS"
"""Part of the loader's error message about thread-local storage."""
_ARCHITECTURE = re.compile(r"[0-9]+\.[0-9]+(\+PTX)?")


def accelerators(host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """Fewer accelerators than slots, or accelerators that torch cannot inspect."""
    found, slots = facts.devices, requirements.slots[host]
    if found.error:
        return None if _STATIC_TLS in found.error else f"{found.error}. Repair the installation there"
    if requirements.accelerator != CPU and max(slots) >= found.count:
        return (
            f"torch can use {quantity(found.count, 'accelerator')}, but slot {max(slots)} is requested. Repair the "
            "driver there, request fewer slots, or set cluster.accelerator=cpu"
        )
    return None


def accelerators_in_use(_host: str, facts: Facts, _requirements: LaunchRequirements) -> str | None:
    """Accelerators that another run of this package has locked, or whose memory another program uses."""
    found = facts.devices
    if found.held_by:
        held = ", ".join(f"{slot} by {holder}" for slot, holder in found.held_by.items())
        return (
            f"accelerators are in use: {held}. Wait for that run, end it, or choose other accelerators with "
            "cluster.include"
        )
    if used := {slot: size for slot, size in found.used_bytes.items() if size > _IN_USE_BYTES}:
        taken = ", ".join(f"{slot} ({format_bytes(size)})" for slot, size in used.items())
        return (
            f"another program uses memory of accelerator {taken}. End it, or choose other accelerators with "
            "cluster.include"
        )
    return None


def memory(host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """Too little memory for the ranks."""
    needed, found = requirements.memory_bytes.get(host, 0), facts.resources.memory_bytes
    if found >= needed:
        return None
    available = f"{format_bytes(found)} of memory are available"
    return f"{available}, but the ranks need {format_bytes(needed)}. Use fewer slots there, or less layout.offload"


def shared_memory(host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """Too little free space in /dev/shm for the collectives of the ranks."""
    found = FreeSpace(facts.resources.shared_memory_free_bytes, facts.resources.shared_memory_bytes)
    return shortage(found, requirements.shared_memory_bytes.get(host, 0))


def open_files(_host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """Too few open files: a rank has connections to all others, for each group of ranks."""
    needed, found = _FILES + _FILES_A_RANK * requirements.num_ranks, facts.resources.open_files
    if found >= needed or found < 0:  # RLIM_INFINITY is -1
        return None
    return (
        f"{found} open files are allowed, but the run needs {needed} for {quantity(requirements.num_ranks, 'rank')}. "
        "Raise nofile in /etc/security/limits.conf there, or LimitNOFILE of sshd"
    )


def ninja(_host: str, facts: Facts, _requirements: LaunchRequirements) -> str | None:
    """No ninja. DeepSpeed needs it even if every operator is already compiled."""
    remedy = "not on the PATH that sshd sets. Run `pip install ninja` there, or put ninja into /usr/bin"
    return None if facts.build.ninja else f"ninja is {remedy}"


def operators(_host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """A compiled operator is missing, and there is no compiler."""
    missing = _not_compiled(facts, requirements)
    if not missing or facts.build.compiler:
        return None
    return f"DeepSpeed's {', '.join(missing)} is not compiled, and there is no C++ compiler. Install g++ there"


def operators_to_compile(_host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """A note about operators that ranks still have to compile, which only takes time at the start."""
    missing = _not_compiled(facts, requirements)
    if not missing or not facts.build.compiler:
        return None
    return f"compiles DeepSpeed's {', '.join(missing)} when its ranks start, which takes about a minute each"


def _not_compiled(facts: Facts, requirements: LaunchRequirements) -> list[str]:
    return sorted(set(requirements.operators) - set(facts.build.compiled))


def unwritable(_host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """Folders of compiled operators that ranks cannot write. They write a lock there even if nothing is to compile."""
    if not requirements.operators or not facts.build.unwritable:
        return None
    return f"{unwritable_text(facts.build.unwritable)} and list it in cluster.environment"


def foreign_locks(_host: str, facts: Facts, _requirements: LaunchRequirements) -> str | None:
    """Compile locks of other users. A rank may wait until such a lock is removed, and only its owner can remove it."""
    if not (locks := facts.build.foreign_locks):
        return None
    return (
        f"the compile lock {', '.join(locks)} belongs to another user. Ask that user to remove the lock, or set "
        "TORCH_EXTENSIONS_DIR to another folder"
    )


def cleared_locks(_host: str, facts: Facts, _requirements: LaunchRequirements) -> str | None:
    """A note about compile locks that were removed, as ranks would wait for them, and about locks on a shared disk."""
    cleared, shared = facts.build.cleared_locks, facts.build.shared_locks
    if shared:
        return (
            f"ranks wait for the compile lock {', '.join(shared)}, on a disk that other machines may use. If no "
            "machine is compiling there, remove the lock, or unset TORCH_EXTENSIONS_DIR"
        )
    return f"removed {', '.join(cleared)}, left behind by a compile that was killed" if cleared else None


def openmp(_host: str, facts: Facts, requirements: LaunchRequirements) -> str | None:
    """Torch's OpenMP library cannot be loaded, usually for lack of static TLS, and ranks do not preload it."""
    error = facts.software.libgomp_error or (facts.devices.error if _STATIC_TLS in facts.devices.error else "")
    if not error or "libgomp" in requirements.environment.get("LD_PRELOAD", ""):
        return None
    return f"{error}. Set LD_PRELOAD to that library, and list LD_PRELOAD in cluster.environment"


def unknown_architectures(requirements: LaunchRequirements) -> list[str]:
    """Names in TORCH_CUDA_ARCH_LIST that DeepSpeed cannot parse: it expects numbers, and rejects 9.0a and Hopper."""
    given = requirements.environment.get("TORCH_CUDA_ARCH_LIST", "")
    wrong = [name for name in given.replace(";", " ").split() if not _ARCHITECTURE.fullmatch(name)]
    if not wrong or requirements.accelerator == CPU:
        return []
    return [
        f"TORCH_CUDA_ARCH_LIST is {given!r}: DeepSpeed cannot read {', '.join(wrong)}. Use versions such as "
        "'8.0;9.0+PTX', or unset it"
    ]
