"""Whether this machine's memory can take what is to come, asked before anything expensive starts."""

import os
from pathlib import Path

from t5train.errors import SpecError

_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def require_host_memory(needed_bytes: int, decided_by: str) -> None:
    """SpecError that names the settings that decide it, unless this machine has ``needed_bytes`` of memory in all."""
    if (found := host_memory_bytes()) < needed_bytes:
        raise SpecError(
            f"{decided_by} ask for {needed_bytes / 1e9:.1f} GB of host memory, and this machine has {found / 1e9:.1f} "
            "GB: keep more on the accelerators (layout.offload), take fewer ranks, a smaller model or a larger machine "
            "(--dry-run shows what takes how much)"
        )


def host_memory_bytes() -> int:
    """What the machine has, or less where this process's control group may take less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += [int(text) for path in _GROUP_LIMITS if path.exists() and (text := path.read_text().strip()) != "max"]
    return min(limits)
