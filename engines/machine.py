"""What this machine has."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def free_memory() -> int | None:
    """Bytes of memory this machine can still give; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def processor() -> tuple[str, int]:
    """Name of the processor, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return name, len(os.sched_getaffinity(0))
