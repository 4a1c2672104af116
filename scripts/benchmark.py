#!/usr/bin/env python
"""Seconds per picture: transformers eager `generate` and our presets, interleaved in one run.

Same prompts, guidance and timing boundary (prompt in, pixels out); neither side spins while it waits, since in one
process the spinning threads of one would take the cores of the other; warm-up apart. Absolute times depend on the
machine: compare the ratios.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import numpy as np
import torch
import typer
from rich.progress import track

from runtime import ImageModel
from runtime.sweep import read_prompts

ROOT = Path(__file__).parents[1]


class Eager:
    """transformers' own Janus, float32, sampling with guidance as its generation configuration says."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoTokenizer, JanusForConditionalGeneration

        self.model = JanusForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    @torch.no_grad()
    def draw(self, prompt: str, guidance: float, seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        inputs = self.tokenizer([prompt + "<begin_of_image>"], return_tensors="pt")
        tokens = self.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_mode="image",
            do_sample=True,
            top_k=0,
            guidance_scale=guidance,
        )
        pixels = self.model.decode_image_tokens(tokens)
        levels: np.ndarray = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
        return levels


def peak_memory(prompt: str) -> float:
    """Peak resident memory of `csd generate` in MB, in a process of its own."""
    code = (
        "from pathlib import Path; from runtime import ImageModel; "
        f"ImageModel.open().generate({prompt!r}); "
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout) / 1024


def main(
    bundle: Annotated[Path | None, typer.Option(help="Bundle; without it the demo model.")] = None,
    checkpoint: Annotated[Path, typer.Option(help="The checkpoint it was exported from.")] = ROOT / "export" / "demo",
    prompts: Annotated[Path, typer.Option(help="Prompt file.")] = ROOT / "scripts" / "prompts_report.txt",
    count: Annotated[int, typer.Option(help="Pictures per contestant.")] = 12,
    presets: Annotated[str, typer.Option(help="Presets, comma-separated; `csd:16` is csd with a window of 16.")] = (
        "ar,sjd,sjd-maximal,csd:16,csd"
    ),
    threads: Annotated[int, typer.Option(help="Threads on both sides.")] = 2,
    eager_threads: Annotated[int | None, typer.Option(help="Other threads for eager.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write every trial as JSON.")] = None,
) -> None:
    """Measure and print a Markdown table."""
    eager_threads = eager_threads or threads
    torch.set_num_threads(eager_threads)
    texts = read_prompts(prompts)
    model, eager = ImageModel.open(bundle, threads=threads), Eager(checkpoint)
    guidance = float(model.bundle.manifest.recommended["guidance"])
    names = ["eager", *presets.split(",")]
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in track(range(-1, count), description="measuring"):
        prompt = texts[number % len(texts)]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            if name == "eager":
                eager.draw(prompt, guidance, number + 1)
                passes = model.bundle.manifest.image_tokens
            else:
                preset, _, window = name.partition(":")
                chosen = model.preset(preset, window=int(window) if window else None)
                passes = model.generate(prompt, preset=chosen, seed=number + 1).forward_passes
            if number >= 0:  # the first round is warm-up
                trials[name].append({"seconds": time.perf_counter() - began, "forward_passes": passes})
    print(table(trials))
    print(f"guidance {guidance:g}, {count} pictures each, {threads} threads, medians; eager with {eager_threads}")
    print(f"peak memory of drawing with the default preset: {peak_memory(texts[0]):.0f} MB")
    if output:
        output.write_text(json.dumps(trials, indent=1) + "\n", "utf-8")


def table(trials: dict[str, list[dict[str, Any]]]) -> str:
    """Median seconds with quartiles, passes, and ratios to eager and to `ar`."""
    lines = [
        "| | s per picture | quartiles | forward passes | times as fast as eager | times as fast as ar |",
        "|---|---|---|---|---|---|",
    ]
    median = {name: float(np.median([trial["seconds"] for trial in own])) for name, own in trials.items()}
    for name, own in trials.items():
        low, high = np.percentile([trial["seconds"] for trial in own], [25, 75])
        passes = np.mean([trial["forward_passes"] for trial in own])
        label = "transformers eager `generate`" if name == "eager" else f"`{name}`"
        lines.append(
            f"| {label} | {median[name]:.3f} | {low:.3f} - {high:.3f} | {passes:.1f} "
            f"| {median['eager'] / median[name]:.2f} | {median.get('ar', float('nan')) / median[name]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
