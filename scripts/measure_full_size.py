#!/usr/bin/env python
"""A step of a full-size model: PyTorch eager in float32 against bundles, in the middle of a picture, interleaved.

One token per row, two rows, caches filled to half a picture, sampling included on both sides: seconds per picture at
equal forward passes are these times the number of passes. Also the floor of each bundle's step on this machine.

    .venv/bin/python -m scripts.write_full_size CHECKPOINT
    .venv/bin/csd export CHECKPOINT -o BUNDLE --precision int8 --force
    .venv/bin/python -m scripts.measure_full_size CHECKPOINT BUNDLE...
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from export.families import find_family
from runtime import ImageModel
from runtime.backends import CpuBackend
from runtime.bench.floor import floor, step_work
from runtime.bench.measure import tail_seconds
from runtime.bench.roofs import measure_roofs
from runtime.bundle import open_bundle
from runtime.decoder import Request, Setup
from runtime.host_loop import HostLoop

LENGTH = 320  # positions in the caches
GUIDANCE = 5.0


def eager_step(checkpoint: Path) -> Callable[[], object]:
    """Transformer, head, guidance and a sample, DynamicCache cut back to LENGTH after every step."""
    from transformers.cache_utils import DynamicCache

    loaded = find_family(checkpoint).load(checkpoint)
    body, head, embedding = loaded.language_model.float(), loaded.head.float(), loaded.embedding[0].float()
    del loaded
    gc.collect()
    cache = DynamicCache()
    with torch.no_grad():
        body(inputs_embeds=embedding[torch.zeros(2, LENGTH, dtype=torch.int64)], cache=cache, use_cache=True)

    @torch.no_grad()
    def step() -> object:
        if over := cache.get_seq_length() - LENGTH:
            cache.crop(-over)
        fed = embedding[torch.ones(2, 1, dtype=torch.int64)]
        logits = head(body(inputs_embeds=fed, cache=cache, use_cache=True).last_hidden_state[:, -1])
        scores = GUIDANCE * logits[:1] + (1 - GUIDANCE) * logits[1:]
        return torch.multinomial(scores.softmax(-1), 1)

    return step


def bundle_step(model: ImageModel, window: int) -> Callable[[], None]:
    """The same step of the loop again and again: it reads one state and writes the other."""
    setup = Setup(model.bundle.manifest, model.preset("csd").settings(), window, GUIDANCE, 1, LENGTH)
    assert isinstance(model.backend, CpuBackend)
    loop = HostLoop(model.backend.step, setup)
    loop.reserve(LENGTH + window)  # as the decoder does: attention's time grows with the capacity
    loop.rest()
    ids = np.zeros(LENGTH + 1, np.int64)
    loop.prompts([(row, ids[:-1]) for row in range(2)])
    loop.begin(0, setup.start(Request((ids, ids), 0)))
    return loop._steps[0]


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    bundles: Annotated[list[Path], typer.Argument(help="Bundles exported from it.")],
    rounds: Annotated[int, typer.Option(help="Steps of each.")] = 15,
    threads: Annotated[int, typer.Option(help="Threads on both sides.")] = 2,
) -> None:
    """Print a Markdown table."""
    torch.set_num_threads(threads)
    opened = [open_bundle(path, verify=False) for path in bundles]
    works = [step_work(bundle) for bundle in opened]
    roofs = [measure_roofs(threads, work.weight_bytes) for work in works]  # while the memory is free
    models = [ImageModel.open(path, threads=threads, verify=False) for path in bundles]
    steps: dict[str, Callable[[], object]] = {"eager, fp32": eager_step(checkpoint)}
    floors, tails = {}, {}
    for model, work, roof in zip(models, works, roofs, strict=True):
        precision = model.bundle.manifest.precision
        for window in (1, 16):
            name = f"{precision}, W = {window}"
            steps[name] = bundle_step(model, window)
            floors[name] = floor(work, roof, 2, window, LENGTH)
            tails[name] = tail_seconds(model, model.preset("csd", window=window), GUIDANCE)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    medians = {name: float(np.median(own[1:])) for name, own in times.items()}
    for roof in roofs:
        print(
            f"roofs: {roof.copy / 1e9:.1f} GB/s copied, {roof.product / 1e9:.0f} GFLOP/s, "
            f"{roof.integer_product / 1e9:.0f} GOP/s of bytes; {threads} threads"
        )
    print("| step | ms | times as fast as eager | floor, ms | set by | step / floor | verification, share |")
    print("|---|---|---|---|---|---|---|")
    for name, seconds in medians.items():
        ratio = medians["eager, fp32"] / seconds
        if name not in floors:
            print(f"| {name} | {seconds * 1e3:.0f} | {ratio:.2f} | - | - | - | - |")
            continue
        least = floors[name]
        print(
            f"| {name} | {seconds * 1e3:.0f} | {ratio:.2f} | {least.seconds * 1e3:.0f} | {least.bound} "
            f"| {seconds / least.seconds:.2f} | {tails[name] / seconds:.1%} |"
        )


if __name__ == "__main__":
    typer.run(main)
