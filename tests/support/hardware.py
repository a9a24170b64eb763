"""Description of the machine that a benchmark ran on."""

import os
import platform
from pathlib import Path


def hardware() -> str:
    """Processor, cores, memory and kernel."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    processor = names[0] if names else platform.processor()
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()} {platform.release()}"
