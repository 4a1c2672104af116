"""Is the exported graph the checkpoint? Windows at ragged lengths, after roll-backs, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from csd_ops.contract import CONTROLS, SETTINGS_SIZE, STATE, Settings, cache_names
from csd_ops.errors import CsdError
from engines.onnx_runtime import OnnxRuntimeEngine
from export.families.base import Loaded
from runtime.bundle import IMAGE_DECODER, STEP, Manifest

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2}  # worst logit difference, relative to the largest logit
GREEDY = {"fp32": 0.999, "fp16": 0.98}  # least share of positions with the same best token
PIXEL_TOLERANCE = 1  # levels of 255
WINDOWS = (1, 5, 16, 3, 2, 8)
FAR = 640  # most ids of the last window: errors that grow with the position show here


class ParityError(CsdError):
    """The exported graph does not compute what the checkpoint computes."""


@dataclass(frozen=True)
class Parity:
    """The worst differences found."""

    logits: float  # relative to the largest logit
    logits_tolerance: float
    greedy: float  # share of positions with the same best token
    pixels: int  # levels of 255
    positions: int  # compared

    def check(self, precision: str) -> None:
        """Raise ParityError when a difference is over its tolerance."""
        if not self.logits <= self.logits_tolerance:  # NaN fails too
            raise ParityError(
                f"expected logits within {self.logits_tolerance:g} of PyTorch's, found {self.logits:.3g}; "
                "nothing was written"
            )
        if self.greedy < GREEDY[precision]:
            raise ParityError(
                f"expected the same best token at {GREEDY[precision]:.1%} of positions, found {self.greedy:.1%}; "
                "nothing was written"
            )
        if self.pixels > PIXEL_TOLERANCE:
            raise ParityError(
                f"expected pixels within {PIXEL_TOLERANCE} of PyTorch's, found {self.pixels}; nothing was written"
            )


def compare(loaded: Loaded, folder: Path, precision: str) -> Parity:
    """Compare the graphs in `folder` with the checkpoint in float32 (its weights rounded to the precision)."""
    logits, greedy, positions = _compare_step(loaded, OnnxRuntimeEngine(folder / STEP), precision)
    pixels = _compare_pixels(loaded, OnnxRuntimeEngine(folder / IMAGE_DECODER))
    return Parity(logits, TOLERANCE[precision], greedy, pixels, positions)


@dataclass
class StepRunner:
    """The step graph with its caches, for any window: what comparisons need, not what decoding uses."""

    engine: OnnxRuntimeEngine
    manifest: Manifest
    rows: int
    capacity: int

    def __post_init__(self) -> None:
        manifest = self.manifest
        dtype = np.float16 if manifest.precision == "fp16" else np.float32
        shape = (self.rows, manifest.key_value_heads, self.capacity, manifest.head_size)
        self.caches = {name: np.zeros(shape, dtype) for name in cache_names(manifest.layers)}

    def __call__(self, ids: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Feed a window [R, W] at `length` [R]; logits [R, W, V]."""
        rows, window = ids.shape
        vocabulary = self.manifest.image_vocabulary
        sizes = {"R": rows, "B": rows, "G": 1, "W": window, "V": vocabulary, "C": self.manifest.columns}
        sizes |= {"T": window, "N": 1, str(SETTINGS_SIZE): SETTINGS_SIZE, "3": 3}
        inputs = {
            name: np.zeros([sizes[dim] for dim in shape], dtype) for name, (dtype, shape) in (STATE | CONTROLS).items()
        }
        inputs["ids"][:], inputs["length"][:], inputs["guidance"][:] = ids, length, 1.0
        inputs["settings"][:] = Settings().vector()
        logits = np.empty((rows, window, vocabulary), np.float32)
        outputs = {f"next_{name}": array for name, array in self.caches.items()} | {"logits": logits}
        self.engine.bind({**inputs, **self.caches}, outputs)()
        return logits


def _compare_step(loaded: Loaded, engine: OnnxRuntimeEngine, precision: str) -> tuple[float, float, int]:
    """Feed random prompts of ragged lengths, then windows of which a random part is kept each time."""
    generator = np.random.default_rng(0)
    manifest = loaded.manifest
    rows, prompt = 3, 6
    far = max(2, min(FAR, manifest.context - prompt - sum(WINDOWS), manifest.image_tokens))
    capacity = prompt + sum(WINDOWS) + far
    run = StepRunner(engine, manifest, rows, capacity)
    text = generator.integers(0, manifest.text_vocabulary, (rows, prompt)) + manifest.image_vocabulary
    lengths = generator.integers(1, prompt + 1, rows)
    run(text, np.zeros(rows, np.int64))  # ids past a row's length are overwritten by its first window
    known = [list(text[row, : lengths[row]]) for row in range(rows)]
    worst, same, positions, largest, finite = 0.0, 0, 0, 0.0, True
    for window in (*WINDOWS, far):
        fed = generator.integers(0, manifest.image_vocabulary, (rows, window))
        length = np.array([len(ids) for ids in known], np.int64)
        got = run(fed, length)
        finite &= bool(np.isfinite(got).all())  # a NaN is lost in max()
        for row in range(rows):
            expected = _full_forward(loaded, [*known[row], *fed[row]])[-window:]
            worst = max(worst, float(np.abs(got[row] - expected).max()))
            largest = max(largest, float(np.abs(expected).max()))
            same += int((got[row].argmax(-1) == expected.argmax(-1)).sum())
            positions += window
            known[row] += list(fed[row, : generator.integers(1, window + 1)])  # the rest is rolled back
    if not finite:
        return float("nan"), 0.0, positions
    return worst / largest, same / positions, positions


@torch.no_grad()
def _full_forward(loaded: Loaded, ids: list[int]) -> np.ndarray:
    """Logits [L, V] of one whole sequence, float32, stock modelling code, no cache."""
    with in_float32(loaded):
        hidden = loaded.language_model(inputs_embeds=embed(loaded, ids)[None], use_cache=False).last_hidden_state
        logits: np.ndarray = loaded.head(hidden)[0].numpy()
    return logits


def embed(loaded: Loaded, ids: Sequence[int]) -> torch.Tensor:
    """Rows of the table in parts, float32 [L, width]."""
    starts = np.cumsum([0, *(len(part) for part in loaded.embedding)])
    rows = []
    for identifier in ids:
        part = int(np.searchsorted(starts, int(identifier), side="right")) - 1
        rows.append(loaded.embedding[part][int(identifier) - int(starts[part])].float())
    return torch.stack(rows)


@contextmanager
def in_float32(loaded: Loaded) -> Iterator[None]:
    """Compute in float32 whatever the weights are stored in: each part's weights are widened while it runs."""
    handles = []

    def widen(module: nn.Module, _inputs: object) -> None:
        module.stored = [parameter.data for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, _inputs: object, _output: object) -> None:
        for parameter, stored in zip(module.parameters(), module.stored, strict=True):
            parameter.data = stored
        del module.stored

    parts = [*loaded.language_model.layers, loaded.language_model.norm, loaded.head]
    try:
        for part in parts:
            handles.append(part.register_forward_pre_hook(widen))
            handles.append(part.register_forward_hook(restore))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _compare_pixels(loaded: Loaded, engine: OnnxRuntimeEngine) -> int:
    manifest = loaded.manifest
    codes = np.random.default_rng(1).integers(0, manifest.image_vocabulary, (2, manifest.codes))
    pixels = np.empty((2, manifest.height, manifest.width, 3), np.uint8)
    engine.bind({"codes": codes}, {"pixels": pixels})()
    expected = loaded.image_decoder(torch.from_numpy(codes)).numpy()
    if expected.shape != pixels.shape:
        raise ParityError(f"expected pixels {expected.shape}, found {pixels.shape}; nothing was written")
    return int(np.abs(expected.astype(int) - pixels.astype(int)).max())
