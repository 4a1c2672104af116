"""What this machine has."""

from __future__ import annotations

from pathlib import Path


def free_memory() -> int | None:
    """Bytes of memory this machine can still give; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
