"""The report as a table, a plot and a file."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.errors import MachineError
from runtime.bench.measure import PARTS, Report
from runtime.bundle import write_bytes

COLOURS = ("#4c72b0", "#dd8452", "#8c8c8c", "#55a868")


def markdown(report: Report) -> str:
    """One row per contestant: seconds, passes, parts of a pass, floor, ratios."""
    names = report.contestants
    eager = min((name for name in names if "eager" in name), key=report.median, default=None)
    base = eager or names[0]
    lines = [
        "| | s per picture, p50 | p95 | p99 | forward passes | tokens per pass | ms per pass: transformer | verify "
        f"| host | image decode, ms | step / floor | times as fast as {base} |",
        "|---" * 12 + "|",
    ]
    for name in names:
        own = report.of(name)
        p50, p95, p99 = np.percentile([trial.seconds for trial in own], [50, 95, 99])
        decode = float(np.median([trial.parts["image decode"] for trial in own])) * 1e3
        parts = [report.part(name, part) for part in ("transformer", "verify", "host")]
        at_floor = report.step(name) / report.floors[name].seconds if name in report.floors else float("nan")
        lines.append(
            f"| `{name}` | {p50:.3f} | {p95:.3f} | {p99:.3f} | {report.passes(name):.1f} "
            f"| {own[0].tokens / report.passes(name):.2f} | {' | '.join(number(part, 3) for part in parts)} "
            f"| {decode:.1f} | {number(at_floor, 2)} | {report.median(base) / p50:.2f} |"
        )
    return "\n".join(lines) + "\n"


def number(value: float, digits: int) -> str:
    """A figure, or a dash where it could not be told."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def notes(report: Report) -> list[str]:
    """The conditions and the floors, a sentence each."""
    machine, roofs, settings = report.machine, report.roofs, report.settings
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {settings['threads']} threads, wait {settings['wait']}, "
        f"{machine['provider']} {settings['precision']}; guidance {settings['guidance']:g}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        f"roofs: {roofs.copy / 1e9:.1f} GB/s copied (read and written), {roofs.product / 1e9:.0f} GFLOP/s in float32 "
        f"products, {roofs.integer_product / 1e9:.0f} GOP/s "
        f"in products of bytes; a step reads {report.work.weight_bytes / 1e6:.1f} MB of weights",
    ]
    for name, least in report.floors.items():
        rates = report.rates(name)
        lines.append(
            f"{name}: the floor of a step is {least.seconds * 1e3:.3f} ms, set by {least.bound}; reached "
            f"{report.step(name) * 1e3:.3f} ms, {rates['bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{rates['operations_per_second'] / 1e9:.0f} GFLOP/s"
        )
    if report.memory:
        lines.append("peak memory: " + ", ".join(f"{name} {size:.0f} MB" for name, size in report.memory.items()))
    return lines


def pyplot() -> Any:
    """Matplotlib without a display.

    Raises:
        MachineError: not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plots
    except ImportError:
        raise MachineError("expected matplotlib for the plot, found none; install `csd-toolkit[plot]`") from None
    return plots


def plot(report: Report, path: Path) -> None:
    """Median seconds per picture of every contestant, stacked by part; eager beside ours."""
    plots = pyplot()
    names = report.contestants[::-1]
    figure, axes = plots.subplots(figsize=(9, 0.55 * len(names) + 1.6), layout="constrained")
    left = np.zeros(len(names))
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = np.array(
            [float(np.median([trial.parts.get(part, 0.0) for trial in report.of(name)])) for name in names]
        )
        axes.barh(names, widths, left=left, color=colour, label=part)
        left += widths
    for place, name in enumerate(names):
        axes.text(left[place], place, f" {report.median(name):.3f} s", va="center", fontsize=9)
    axes.set_xlim(0, left.max() * 1.14)
    axes.set_xlabel("seconds per picture, prompt to pixels, medians")
    axes.legend(fontsize=9, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    data = BytesIO()
    figure.savefig(data, format="png", dpi=110)
    plots.close(figure)
    write_bytes(path, data.getvalue())
