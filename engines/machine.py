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


def multiplies_bytes() -> bool:
    """Whether products of uint8 and int8 are exact here.

    On x86 without VNNI, ONNX Runtime adds pairs of them in 16 bits, which saturate.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    except OSError:
        return False
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def processor() -> tuple[str, int]:
    """Name of the processor, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return name, len(os.sched_getaffinity(0))
