"""Checks that each host has the resources that its ranks need: accelerators, memory and file descriptors."""

from collections.abc import Iterator

from infra.head.preflight.compilation import STATIC_TLS
from infra.head.preflight.findings import HostReplies, of_each
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.attempts.shared_memory import FreeSpace, shortage
from infra.node.inspection.accelerators import CPU
from infra.node.inspection.facts import Facts
from t5train.quantities import format_bytes, quantity

_IN_USE_BYTES = 2 * 10**9  # drivers, displays and our own inspection use less
_FILES, _FILES_A_RANK = 512, 8


def accelerators(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Hosts with fewer accelerators than slots, or with accelerators that torch cannot inspect."""

    def complaint(host: str, facts: Facts) -> str | None:
        found, slots = facts.devices, requirements.slots[host]
        if found.error:
            return None if STATIC_TLS in found.error else f"{found.error}. Repair the installation there"
        if requirements.accelerator != CPU and max(slots) >= found.count:
            return (
                f"torch can use {quantity(found.count, 'accelerator')}, but slot {max(slots)} is requested. Repair the "
                "driver there, request fewer slots, or set cluster.accelerator=cpu"
            )
        return None

    yield from of_each(replies, complaint)


def accelerators_in_use(replies: HostReplies) -> Iterator[str]:
    """Accelerators that another run of this package has locked, or whose memory another program uses."""

    def complaint(_: str, facts: Facts) -> str | None:
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

    yield from of_each(replies, complaint)


def memory(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Hosts with too little memory for their ranks."""

    def complaint(host: str, facts: Facts) -> str | None:
        needed, found = requirements.memory_bytes.get(host, 0), facts.resources.memory_bytes
        if found >= needed:
            return None
        available = f"{format_bytes(found)} of memory are available"
        return f"{available}, but the ranks need {format_bytes(needed)}. Use fewer slots there, or less layout.offload"

    yield from of_each(replies, complaint)


def shared_memory(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Hosts with too little free space in /dev/shm for the collectives of their ranks."""

    def complaint(host: str, facts: Facts) -> str | None:
        found = FreeSpace(facts.resources.shared_memory_free_bytes, facts.resources.shared_memory_bytes)
        return shortage(found, requirements.shared_memory_bytes.get(host, 0))

    yield from of_each(replies, complaint)


def open_files(replies: HostReplies, requirements: LaunchRequirements) -> Iterator[str]:
    """Hosts that allow too few open files: a rank has connections to all others, for each group of ranks."""
    needed = _FILES + _FILES_A_RANK * requirements.num_ranks

    def complaint(_: str, facts: Facts) -> str | None:
        found = facts.resources.open_files
        if found >= needed or found < 0:  # RLIM_INFINITY is -1
            return None
        return (
            f"{found} open files are allowed, but the run needs {needed} for "
            f"{quantity(requirements.num_ranks, 'rank')}. Raise nofile in /etc/security/limits.conf there, or "
            "LimitNOFILE of sshd"
        )

    yield from of_each(replies, complaint)
