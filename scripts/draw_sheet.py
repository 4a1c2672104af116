#!/usr/bin/env python
"""Draw a contact sheet of a prompt file with the default preset, and its answers beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from runtime import ImageModel
from runtime.prompt import read_prompts


def main(
    prompts: Annotated[Path, typer.Argument(help="Prompt file.")],
    output: Annotated[Path, typer.Argument(help="PNG to write; the prompts go beside it as .txt.")],
    bundle: Annotated[Path | None, typer.Option(help="Bundle; without it the demo model.")] = None,
    preset: Annotated[str | None, typer.Option(help="Preset; without it the bundle's.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance; without it the bundle's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first picture.")] = 0,
    columns: Annotated[int, typer.Option(help="Pictures per row.")] = 8,
    scale: Annotated[int, typer.Option(help="Enlargement.")] = 2,
) -> None:
    """One picture per prompt, row by row."""
    texts = read_prompts(prompts)
    made = ImageModel.open(bundle).generate(texts, preset=preset, guidance=guidance, seed=seed)
    height, width = made.pixels.shape[1:3]
    rows = -(-len(texts) // columns)
    sheet = np.full((rows * (height + 2), columns * (width + 2), 3), 255, np.uint8)
    for index, picture in enumerate(made.pixels):
        top, left = index // columns * (height + 2), index % columns * (width + 2)
        sheet[top : top + height, left : left + width] = picture
    image = Image.fromarray(sheet)
    image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS).save(output)
    answers = "".join(f"{index + 1:2d} {text}\n" for index, text in enumerate(texts))
    output.with_suffix(".txt").write_text(answers, "utf-8")
    passes = made.forward_passes / len(texts)
    print(f"{len(texts)} pictures, {passes:.1f} passes each, entropy {made.entropy:.2f} nats")
    print(f"distortion {made.distortion:.4f} per token; wrote {output}")


if __name__ == "__main__":
    typer.run(main)
