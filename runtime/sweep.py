"""Sweep: many variants of decoding over a prompt list, interleaved and resumable, as lines, a table and a plot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from csd_ops.errors import InputError, MachineError
from runtime.bundle import MANIFEST, sha256, write_bytes, write_text
from runtime.model import ImageModel
from runtime.presets import Preset, parse_settings

RESULTS = "results.jsonl"
SETUP = "sweep.json"
TABLE = "table.md"
PLOT = "pareto.png"
FILES = (RESULTS, TABLE, PLOT)

# One line per variant: a preset and, where given, other numbers; commas make one variant of each value.
STANDARD = (
    "ar",
    "jacobi",
    "sjd window=16,32",
    "sjd-maximal window=16,32,48",
    "sjd-gumbel window=16,32",
    "sjd-maximal window=16,32,48 fresh=law-above",
    "amplify k=1.3,4",
    "addition epsilon=0.1,0.4",
    "entropy",
    "cool",
    "gsd size=3,25",
    "csd-paper delta=0.35,0.65,0.8",
    "csd delta=0.35,0.5,0.65",
)


@dataclass(frozen=True)
class Variant:
    """A preset with its numbers, under the name it has in the table."""

    label: str
    preset: Preset


def expand(lines: Iterable[str], model: ImageModel) -> list[Variant]:
    """Variant lines such as `csd delta=0.35,0.65 window=16` as presets, every combination once."""
    variants: dict[str, Variant] = {}
    for line in lines:
        name, *pairs = line.split()
        choices = [
            [f"{pair.partition('=')[0]}={value}" for value in pair.partition("=")[2].split(",")] for pair in pairs
        ]
        for combination in itertools.product(*choices):
            label = " ".join([name, *combination])
            variants[label] = Variant(label, model.preset(name, **parse_settings(list(combination))))
    return list(variants.values())


def sweep(
    model: ImageModel,
    prompts: Sequence[str],
    variants: Sequence[Variant],
    folder: Path,
    *,
    guidance: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Run every variant on every prompt, one picture at a time, and return the results; finished ones are kept.

    Prompt by prompt all variants run in turn, in an order that rotates, so that what the machine does meanwhile
    falls on all of them. Prompt i uses seed + i.
    """
    setup = {
        "bundle": sha256(model.bundle.path(MANIFEST)),
        "guidance": guidance,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "prompts": list(prompts),
    }
    results = _resume(folder, setup)
    done = {(entry["variant"], entry["number"]) for entry in results}
    total = len(prompts) * len(variants)
    wanted = {variant.label for variant in variants}
    finished = sum(key[0] in wanted for key in done)
    if variants and finished < total:  # the first call pays for memory and caches: not timed
        model.generate(prompts[0], preset=variants[0].preset, guidance=guidance, seed=seed)
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                if (variant.label, number) in done:
                    continue
                made = model.generate(
                    prompt,
                    preset=variant.preset,
                    guidance=guidance,
                    temperature=temperature,
                    top_k=top_k,
                    seed=seed + number,
                )
                decoded = made.decoded[0]
                entry = {
                    "variant": variant.label,
                    "number": number,
                    "prompt": prompt,
                    "seed": decoded.seed,
                    "window": variant.preset.window,
                    "lossless": variant.preset.lossless,
                    "tokens": len(decoded.tokens),
                    "forward_passes": decoded.passes,
                    "seconds": round(made.seconds, 5),
                    "distortion": decoded.mean("distortion"),
                    "excess": float(decoded.excess.mean()),
                    "entropy": decoded.mean("entropy"),
                }
                file.write(json.dumps(entry) + "\n")
                file.flush()
                results.append(entry)
                finished += 1
                if on_progress:
                    on_progress(finished, total)
    return [entry for entry in results if entry["variant"] in wanted]


def _resume(folder: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """The finished results of a folder that was made with the same setup; a torn last line is dropped."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"expected to write in {folder}, found: {error.strerror}; name another output") from None
    path = folder / SETUP
    if path.is_file():
        try:
            before = json.loads(path.read_text("utf-8"))
        except ValueError:
            raise InputError(f"expected JSON in {path}, found none; name another output folder") from None
        changed = [name for name in setup if before.get(name) != setup[name]]
        if changed:
            raise InputError(
                f"expected a sweep of the same {', '.join(changed)} in {folder}, found another; name another output"
            )
    else:
        write_text(path, json.dumps(setup, indent=1) + "\n")
    results = []
    lines = folder / RESULTS
    text = lines.read_text("utf-8") if lines.is_file() else ""
    for line in text.splitlines():
        try:
            results.append(json.loads(line))
        except ValueError:
            break
    if lines.is_file():
        write_text(lines, "".join(json.dumps(entry) + "\n" for entry in results))
    return results


@dataclass(frozen=True)
class Row:
    """One variant over all prompts: means, and the standard error over prompts."""

    variant: str
    window: int
    lossless: bool
    seconds: float
    passes: float
    passes_error: float
    distortion: float
    excess: float
    excess_error: float
    entropy: float


def summarise(results: Sequence[dict[str, Any]]) -> list[Row]:
    """One row per variant, in the order they first appear with `ar` first."""
    names = list(dict.fromkeys(entry["variant"] for entry in sorted(results, key=lambda e: e["variant"] != "ar")))
    rows = []
    for name in names:
        own = [entry for entry in results if entry["variant"] == name]

        def values(key: str, own: list[dict[str, Any]] = own) -> np.ndarray:
            return np.array([entry[key] for entry in own], dtype=float)

        def error(key: str, values: Callable[[str], np.ndarray] = values) -> float:
            found = values(key)
            return float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else float("nan")

        rows.append(
            Row(
                name,
                own[0]["window"],
                own[0]["lossless"],
                float(np.median(values("seconds"))),
                float(values("forward_passes").mean()),
                error("forward_passes"),
                float(values("distortion").mean()),
                float(values("excess").mean()),
                error("excess"),
                float(values("entropy").mean()),
            )
        )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The layout of the CSD paper's Tables 1 to 4, with distortion and excess surprise in place of FID and CLIP."""
    base = next((row for row in rows if row.variant == "ar"), rows[0])
    lines = [
        f"| method | W | latency s | steps | x latency (to {base.variant}) | x steps | distortion | excess, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.variant} | {row.window} | {row.seconds:.3f} | {row.passes:.1f} ± {row.passes_error:.1f} "
            f"| {base.seconds / row.seconds:.2f} | {base.passes / row.passes:.2f} "
            f"| {'0 (exact)' if row.lossless else f'{row.distortion:.4f}'} "
            f"| {row.excess:+.3f} ± {row.excess_error:.3f} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Forward passes against distortion, one point per variant: lower left is better."""
    from io import BytesIO

    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MachineError("expected matplotlib for the plot, found none; install `csd-toolkit[plot]`") from None
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.variant.split()[0], []).append(row)
    markers = itertools.cycle("osD^vP*X<>hd")
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for index, (name, own) in enumerate(families.items()):
        own = sorted(own, key=lambda row: row.passes)
        points = [row.passes for row in own], [row.distortion for row in own]
        relaxed = any(row.distortion > 0 for row in own) and len(own) > 1
        axes.plot(
            *points,
            next(markers) + ("-" if relaxed else ""),
            label=name,
            color=colours[index % 20],
            markersize=8,
            linewidth=1,
        )
    axes.set_xscale("log")
    axes.set_xlabel("forward passes per picture (log scale)")
    axes.set_ylabel("distortion per token, TV(law of the token, target law)")
    axes.set_title("Forward passes against distortion: lower left is better")
    ticks = [20, 30, 40, 60, 80, 100, 150, 250, 500, 1000, 2500]
    low, high = min(row.passes for row in rows) * 0.85, max(row.passes for row in rows) * 1.15
    axes.set_xlim(low, high)
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="preset", fontsize=9)
    data = BytesIO()
    figure.savefig(data, format="png", dpi=110)
    pyplot.close(figure)
    write_bytes(path, data.getvalue())
