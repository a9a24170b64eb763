"""Which machine a node is, whatever it is called (Linux)."""

from pathlib import Path

_BOOT, _MACHINE = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")
_NETWORK = Path("/proc/self/ns/net")


def identity() -> str:
    """Boot, machine and network namespace: two names of one machine have all three in common.

    Containers with networks of their own are machines of their own: ranks meet, and ports are taken, in a network.
    """
    machine = _MACHINE.read_text("ascii").strip() if _MACHINE.exists() else ""
    return f"{_BOOT.read_text('ascii').strip()} {machine} {_NETWORK.readlink()}"
