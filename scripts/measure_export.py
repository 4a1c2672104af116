"""Peak memory and time of every stage of an export; prints a table.

    .venv/bin/python -m scripts.measure_export CHECKPOINT OUTPUT [--precision fp16]

Resident memory counts the checkpoint's mapped pages, which the system takes back when it needs them; anonymous memory
is what the export itself holds.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from export import export_checkpoint


def memory() -> dict[str, float]:
    """Resident and anonymous memory of this process, GB."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e9 for line in lines if line.endswith(" kB")}
    return {"resident": found["VmRSS"], "anonymous": found["RssAnon"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--precision", default="fp16")
    options = parser.parse_args()
    stage, began = "start", time.perf_counter()
    peaks: dict[str, dict[str, float]] = {}
    times: dict[str, float] = {"start": began}

    def watch() -> None:
        while True:
            peak = peaks.setdefault(stage, {"resident": 0.0, "anonymous": 0.0})
            for name, value in memory().items():
                peak[name] = max(peak[name], value)
            time.sleep(0.02)

    def on_stage(name: str, number: int, stages: int) -> None:
        nonlocal stage
        stage, times[name] = name, time.perf_counter()

    threading.Thread(target=watch, daemon=True).start()
    export_checkpoint(options.checkpoint, options.output, precision=options.precision, on_stage=on_stage)
    ends = [*list(times.values())[1:], time.perf_counter()]
    size = sum(path.stat().st_size for path in options.checkpoint.glob("*.safetensors")) / 1e9
    table = Table(title=f"{options.checkpoint}: {size:.2f} GB to {options.precision}", title_justify="left")
    for column in ("stage", "s", "peak resident, GB", "peak anonymous, GB"):
        table.add_column(column)
    for (name, start), end in zip(times.items(), ends, strict=True):
        peak = peaks.get(name, {"resident": 0.0, "anonymous": 0.0})
        table.add_row(name, f"{end - start:.1f}", f"{peak['resident']:.2f}", f"{peak['anonymous']:.2f}")
    Console().print(table)
    most = max(peak["resident"] for peak in peaks.values())
    print(f"peak {most:.2f} GB; 1.25 times the checkpoint plus 1 GB is {1.25 * size + 1:.2f} GB")


if __name__ == "__main__":
    main()
