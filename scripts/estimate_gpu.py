#!/usr/bin/env python
"""An estimate on paper of seconds per picture on GPUs, from the floor model: bytes, window and an assumed acceptance.

Nothing here was measured on a GPU. A step is taken to reach a share of the memory bandwidth that well-made kernels
reach; tokens per pass are the demo model's, measured on a CPU, at the same preset and window, which is an assumption:
the papers report 3.3 to 4.3 for rules like `csd-paper`.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.bench.floor import Work, floor
from runtime.bench.roofs import Roofs

REACHED = 0.7  # of the roofs
ITEM = 2  # bytes: float16 or bfloat16


@dataclass(frozen=True)
class Body:
    """A published configuration: layers, width, feed-forward width, image vocabulary, image tokens, prompt."""

    layers: int
    width: int
    inner: int
    vocabulary: int
    tokens: int
    prompt: int = 32

    @property
    def work(self) -> Work:
        """Of a step; as many key-value heads as heads in both."""
        products = self.layers * (4 * self.width**2 + 3 * self.width * self.inner) + self.width * self.vocabulary
        cache = 2 * self.layers * self.width * ITEM
        return Work(products * ITEM, products, cache, 2 * self.layers * self.width)


BODIES = {
    "Janus-Pro-7B": Body(30, 4096, 11008, 16384, 576),
    "Lumina-mGPT 7B, 768 px": Body(32, 4096, 11008, 8192, 2357),
}
# Bytes per second read, and dense half-precision operations per second, as the maker states them
GPUS = {
    "A100 80GB": Roofs(2.04e12, 312e12, 624e12, 0),
    "H100 SXM": Roofs(3.35e12, 989e12, 1979e12, 0),
    "H200": Roofs(4.8e12, 989e12, 1979e12, 0),
    "RTX 4090": Roofs(1.01e12, 165e12, 660e12, 0),
}
# Preset, window, tokens per pass of the demo model (README)
ASSUMED = (("ar", 1, 1.0), ("csd-paper", 16, 3.7), ("csd", 40, 6.5))


def main() -> None:
    print("| model | GPU | preset | W | tokens per pass (assumed) | ms per step | set by | s per picture |")
    print("|---|---|---|---|---|---|---|---|")
    for name, body in BODIES.items():
        for gpu, roofs in GPUS.items():
            for preset, window, tokens in ASSUMED:
                least = floor(body.work, roofs, 2, window, body.prompt + body.tokens / 2)
                step = least.seconds / REACHED
                print(
                    f"| {name} | {gpu} | `{preset}` | {window} | {tokens:g} | {step * 1e3:.1f} | {least.bound} "
                    f"| {body.tokens / tokens * step:.1f} |"
                )


if __name__ == "__main__":
    main()
