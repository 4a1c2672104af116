"""Is the exported graph the checkpoint? Windows at ragged lengths, after roll-backs, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

from csd_ops.errors import CsdError
from engines.nvidia.graph import load_graph, retype
from engines.onnx_runtime import OnnxRuntimeEngine
from export.families.base import Loaded
from export.segments import Window, run_windows
from runtime.bundle import IMAGE_DECODER, STEP

# Worst logit difference, relative to the largest logit
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2, "int8": 3e-2, "int4": 0.2, "w8a8": 5e-2}
# Least share of positions with the same best token
GREEDY = {"fp32": 0.999, "fp16": 0.98, "bf16": 0.97, "int8": 0.9, "int4": 0.5, "w8a8": 0.9}
PIXEL_TOLERANCE = 1  # levels of 255
WINDOWS = (1, 5, 16, 3, 2, 8)
LARGE = 500_000_000  # parameters from which fewer windows are compared
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

    def check(self, precision: str, *, force: bool = False) -> None:
        """Raise ParityError when a difference is over its tolerance; `force` allows all but what is no number."""
        if force and np.isfinite(self.logits):
            return
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
    """Compare the graphs in `folder` with the checkpoint computed in float32.

    A bfloat16 graph is widened first: ONNX Runtime's CPU has no such products, so that its rounding of activations is
    not in the figures, that of its weights is.
    """
    with TemporaryDirectory(dir=folder) as work:
        path = folder / STEP
        if precision == "bf16":
            path = widen_graph(path, Path(work))
        logits, greedy, positions = _compare_step(loaded, path, precision)
    pixels = _compare_pixels(loaded, OnnxRuntimeEngine(folder / IMAGE_DECODER))
    return Parity(logits, TOLERANCE[precision], greedy, pixels, positions)


def widen_graph(path: Path, work: Path) -> Path:
    """A float32 copy of a step graph, in `work`."""
    model = load_graph(path)
    retype(model, path, "fp32", work)
    (work / path.name).write_bytes(model.SerializeToString())
    return work / path.name


def _compare_step(loaded: Loaded, path: Path, precision: str) -> tuple[float, float, int]:
    """Feed random prompts of ragged lengths, then windows of which a random part is kept each time."""
    generator = np.random.default_rng(0)
    manifest = replace(loaded.manifest, precision=precision)
    large = sum(parameter.numel() for parameter in loaded.language_model.parameters()) > LARGE
    rows, prompt, widths = (2, 6, WINDOWS[:3]) if large else (3, 6, WINDOWS)
    far = max(2, min(FAR, manifest.context - prompt - sum(widths), manifest.image_tokens))
    text = generator.integers(0, manifest.text_vocabulary, (rows, prompt)) + manifest.image_vocabulary
    lengths = generator.integers(1, prompt + 1, rows)
    # ids past a row's length are overwritten by its first window
    windows = [Window(text, np.zeros(rows, np.int64))]
    known = [list(text[row, : lengths[row]]) for row in range(rows)]
    before = []
    for width in (*widths, far):
        fed = generator.integers(0, manifest.image_vocabulary, (rows, width))
        windows.append(Window(fed, np.array([len(ids) for ids in known], np.int64)))
        before.append([list(ids) for ids in known])
        for row in range(rows):
            known[row] += list(fed[row, : generator.integers(1, width + 1)])  # the rest is rolled back
    found = run_windows(path, manifest, windows, prompt + sum(widths) + far)[1:]
    worst, same, positions, largest, finite = 0.0, 0, 0, 0.0, True
    for window, prefixes, got in zip(windows[1:], before, found, strict=True):
        finite &= bool(np.isfinite(got).all())  # a NaN is lost in max()
        width = window.ids.shape[1]
        for row in range(rows):
            expected = _full_forward(loaded, [*prefixes[row], *window.ids[row]])[-width:]
            worst = max(worst, float(np.abs(got[row] - expected).max()))
            largest = max(largest, float(np.abs(expected).max()))
            same += int((got[row].argmax(-1) == expected.argmax(-1)).sum())
            positions += width
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
