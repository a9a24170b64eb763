"""The machine of a result: its hardware and its versions. A baseline counts for the same hardware only.

With other versions it counts as well, because an upgrade is what a night must be able to judge.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from t5train.host_resources import num_cores

_PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
_HARDWARE = ("processor", "cores", "ranks", "device", "hosts")
"""The parts of a key that are no versions: on other hardware, times and memory say nothing about a change."""


def machine_key(num_ranks: int, device: str, hosts: str) -> dict[str, str]:
    """Return the processor, its usable cores, versions, ranks, the kind of device, and hosts if there are any."""
    key = {
        "processor": processor(Path("/proc/cpuinfo")),
        "cores": str(num_cores()),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "ranks": str(num_ranks),
        "device": device,
    }
    return key | ({"hosts": hosts} if hosts else {})


def same_hardware(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two keys are of the same hardware, whatever the versions."""
    return all(one.get(name) == other.get(name) for name in _HARDWARE)


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the versions that changed, such as ``torch 2.12.0 -> 2.13.0``."""
    versions = (name for name in {**before, **now} if name not in _HARDWARE)
    return [
        f"{name} {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}"
        for name in versions
        if before.get(name) != now.get(name)
    ]


def processor(cpuinfo: Path) -> str:
    """Return the processor's name, as Linux knows it."""
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
