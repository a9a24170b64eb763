"""What a baseline is valid for: hardware, versions and number of ranks. Other ones have other rounding and speeds."""

import platform
from importlib.metadata import version
from pathlib import Path

from t5train.host_resources import num_cores

_PACKAGES = ("torch", "deepspeed", "transformers", "numpy")


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


def processor(cpuinfo: Path) -> str:
    """Return the processor's name, as Linux knows it."""
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
