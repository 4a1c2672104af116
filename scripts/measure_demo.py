#!/usr/bin/env python
"""Entropy of the sampled law and forward passes of `sjd` over all 48 concepts of the demo model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parent))

from demo_training.pictures import COLOUR_NAMES, NAMES

from runtime import ImageModel


def main(
    bundle: Annotated[Path | None, typer.Option(help="Bundle; without it the demo model.")] = None,
    count: Annotated[int, typer.Option(help="Pictures per concept.")] = 2,
    seed: Annotated[int, typer.Option(help="First seed.")] = 5000,
    batch: Annotated[int, typer.Option(help="Pictures decoded together.")] = 8,
) -> None:
    """Every concept on a colour of its own; means with their standard errors over pictures."""
    model = ImageModel.open(bundle)
    prompts = [f"{name} on {COLOUR_NAMES[5 * number % len(COLOUR_NAMES)]}" for number, name in enumerate(NAMES)]
    for preset in ("ar", "sjd", "csd"):
        made = model.generate(prompts, preset=preset, count=count, seed=seed, batch=batch)
        entropy = np.array([decoded.mean("entropy") for decoded in made.decoded])
        passes = np.array([decoded.passes for decoded in made.decoded])
        error = 1 / np.sqrt(len(passes))
        print(
            f"{preset}: {len(passes)} pictures, entropy {entropy.mean():.3f} +- {entropy.std() * error:.3f} nats, "
            f"{passes.mean():.1f} +- {passes.std() * error:.1f} forward passes, "
            f"{(model.bundle.manifest.image_tokens + 1) / passes.mean():.2f} times fewer than ar"
        )


if __name__ == "__main__":
    typer.run(main)
