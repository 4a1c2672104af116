#!/usr/bin/env python
"""What a step costs as it grows: time against window, cache capacity, batch and vocabulary, with fitted exponents.

The demo model's step (vocabulary: verification and window logic alone, at a window of 16), all sizes in turn, medians.
The exponent is the slope of log time over log size through the larger half of the sizes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

from csd_ops.contract import CAPACITY_STEP, Coupling, Settings
from csd_ops.rules import Csd
from engines.onnx_runtime import OnnxRuntimeEngine
from runtime import ImageModel
from runtime.bench.report import pyplot
from runtime.bundle import write_text
from runtime.decoder import Request, Setup
from runtime.host_loop import HostLoop
from scripts.benchmark_tail import onnx_tail
from tests.csd_ops.cases import generate

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
CAPACITIES = (320, 640, 1280, 2560, 5120)
BATCHES = (1, 2, 4, 8, 16)
VOCABULARIES = (1024, 2048, 4096, 8192, 16384, 32768)


def step(model: ImageModel, engine: OnnxRuntimeEngine, window: int, capacity: int, batch: int) -> Callable[[], None]:
    """A step in the middle of pictures, bound to buffers of that capacity."""
    manifest = replace(model.bundle.manifest, context=max(CAPACITIES) + 64)
    prompt = capacity - manifest.image_tokens - window - CAPACITY_STEP + 1
    setup = Setup(manifest, model.preset().settings(), window, 1.5, batch, max(prompt, 4))
    loop = HostLoop(engine, setup)
    loop.rest()
    ids = np.full(4, manifest.image_vocabulary + 2, np.int64)
    loop.prompts([(row, ids[:-1]) for row in range(setup.rows)])
    for image in range(batch):
        loop.begin(image, setup.start(Request((ids, ids), image)))
    loop.reserve(capacity)
    return loop._steps[0]  # the same step again and again: it reads one state and writes the other


def tail(vocabulary: int, threads: int) -> Callable[[], object]:
    settings = Settings(coupling=Coupling.MAXIMAL, **Csd().settings())
    case = generate(0, settings, images=1, window=16, vocabulary=vocabulary, columns=24, tokens=576)
    return onnx_tail(replace(case, codes=np.zeros((vocabulary, 1), np.float32)), threads)


def measure(calls: dict[int, Callable[[], object]], seconds: float) -> dict[int, float]:
    """Median milliseconds of each, in turn."""
    times: dict[int, list[float]] = {size: [] for size in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[min(times)]) < 5:
        for size, call in calls.items():
            began = time.perf_counter()
            call()
            times[size].append((time.perf_counter() - began) * 1e3)
    return {size: float(np.median(own)) for size, own in times.items()}


def exponent(curve: dict[int, float]) -> float:
    """Slope of log time over log size, larger half."""
    sizes = list(curve)[len(curve) // 2 :]
    return float(np.polyfit(np.log(sizes), np.log([curve[size] for size in sizes]), 1)[0])


def main(
    threads: Annotated[int, typer.Option(help="Threads.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time for each curve.")] = 12.0,
    pictures: Annotated[int, typer.Option(help="Pictures for seconds per picture against batch.")] = 16,
    output: Annotated[Path, typer.Option(help="Folder for cost_curves.json and .png.")] = Path("scripts/figures"),
) -> None:
    """Measure, print a Markdown table, plot."""
    model = ImageModel.open(threads=threads)
    engine = OnnxRuntimeEngine(model.bundle.path("step.onnx"), threads=threads)
    curves: dict[str, dict[int, float]] = {}
    kinds: dict[str, tuple[tuple[int, ...], Callable[[int], Callable[[], object]]]] = {
        "window": (WINDOWS, lambda size: step(model, engine, size, 384, 1)),
        "capacity (W = 16)": (CAPACITIES, lambda size: step(model, engine, 16, size, 1)),
        "batch (W = 16)": (BATCHES, lambda size: step(model, engine, 16, 384, size)),
        "vocabulary (tail, W = 16)": (VOCABULARIES, lambda size: tail(size, threads)),
    }
    for name, (sizes, make) in track(kinds.items(), transient=True):
        curves[name] = measure({size: make(size) for size in sizes}, seconds)
    per_picture = {size: [] for size in BATCHES}  # type: dict[int, list[float]]
    for _ in range(3):
        for size in BATCHES:
            made = model.generate(["red apple"] * pictures, window=16, batch=size)
            per_picture[size].append(made.seconds / pictures * 1e3)
    curves["batch: ms per picture"] = {size: float(np.median(own)) for size, own in per_picture.items()}
    print("| time in ms against | " + "sizes and times | exponent |\n|---|---|---|")
    for name, curve in curves.items():
        told = ", ".join(f"{size}: {value:.2f}" for size, value in curve.items())
        print(f"| {name} | {told} | {exponent(curve):.2f} |")
    write_text(output / "cost_curves.json", json.dumps(curves, indent=1) + "\n")
    draw(curves, output / "cost_curves.png")


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    plots = pyplot()
    figure, axes = plots.subplots(1, len(curves), figsize=(3.2 * len(curves), 3), layout="constrained")
    for place, (name, curve) in zip(axes, curves.items(), strict=True):
        place.plot(list(curve), list(curve.values()), "o-", color="#4c72b0")
        place.set(xscale="log", yscale="log", xlabel=name, title=f"exponent {exponent(curve):.2f}")
        place.set_xticks(list(curve), labels=[f"{size:g}" for size in curve], fontsize=7, rotation=45)
        place.xaxis.minorticks_off()
        place.yaxis.set_major_formatter("{x:g}")
        place.yaxis.set_minor_formatter("{x:g}")
        place.grid(alpha=0.3)
    axes[0].set_ylabel("ms")
    figure.savefig(path, dpi=110)
    plots.close(figure)


if __name__ == "__main__":
    typer.run(main)
