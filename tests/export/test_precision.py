"""float16 costs the same everywhere in the picture: a rounded rotary frequency would cost more with every position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engines.onnx_runtime import OnnxRuntimeEngine
from export import export_checkpoint, parity, segments
from export.families import find_family
from export.families.base import Loaded
from export.parity import _full_forward, compare
from export.step import hollow
from runtime.bundle import STEP
from tests.export.step_runner import StepRunner
from tests.models import write_tiny_janus


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Path]:
    """A checkpoint in float32, and its float16 bundle."""
    folder = tmp_path_factory.mktemp("half")
    checkpoint = write_tiny_janus(
        folder / "checkpoint", image_vocabulary=60, side=12, width=128, heads=2, key_value_heads=1
    )
    tensors = load_file(checkpoint / "model.safetensors")
    for name in tensors:
        if name.endswith("language_model.layers.0.self_attn.q_proj.weight"):
            tensors[name] *= 4  # attention as sharp as a trained one: a flat one hides wrong rotations
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(checkpoint, folder / "bundle", precision="fp16")
    return find_family(checkpoint).load(checkpoint), folder / "bundle"


def test_the_grid_is_the_one_asked_for(half: tuple[Loaded, Path]) -> None:
    assert (half[0].manifest.rows, half[0].manifest.columns) == (12, 12)


def test_float16_is_as_good_far_out(half: tuple[Loaded, Path]) -> None:
    loaded, folder = half
    window, windows = 28, 8
    manifest = replace(loaded.manifest, precision="fp16")
    run = StepRunner(OnnxRuntimeEngine(folder / STEP, threads=1), manifest, 2, window * windows)
    ids = np.random.default_rng(0).integers(0, manifest.image_vocabulary, (2, window * windows))
    expected = np.stack([_full_forward(loaded, list(row)) for row in ids])
    errors = []
    for start in range(0, window * windows, window):
        got = run(ids[:, start : start + window], np.full(2, start))
        errors.append(float(np.abs(got - expected[:, start : start + window]).max() / np.abs(expected).max()))
    assert max(errors) < 4e-3 and errors[-1] < 3 * errors[0], errors


def test_a_window_of_nothing_is_noticed(half: tuple[Loaded, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in one window only, not the last: max() alone would lose it."""
    loaded, folder = half
    whole = parity.run_windows

    def torn(*arguments: Any) -> list[np.ndarray]:
        found = whole(*arguments)
        found[3][0, 0, -1] = np.nan
        return found

    monkeypatch.setattr(parity, "run_windows", torn)
    manifest = replace(loaded.manifest, precision="fp16")
    assert np.isnan(compare(replace(loaded, manifest=manifest), folder, "fp16").logits)


def test_pieces_of_a_graph_give_what_the_whole_gives(
    half: tuple[Loaded, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models are compared in pieces; one weight a piece is the worst case."""
    loaded, folder = half
    manifest = replace(loaded.manifest, precision="fp16")
    generator = np.random.default_rng(0)
    windows = [
        segments.Window(generator.integers(0, 60, (2, width)), np.array(length))
        for width, length in ((6, (0, 0)), (3, (4, 6)), (5, (2, 9)))
    ]
    whole = segments.run_windows(folder / STEP, manifest, windows, 24)
    monkeypatch.setattr(segments, "PIECE", 1)
    for one, other in zip(segments.run_windows(folder / STEP, manifest, windows, 24), whole, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3 * np.abs(other).max())


def test_parameters_of_a_trace_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096

    module = torch.nn.Linear(1, 1)
    module.register_parameter("large", torch.nn.Parameter(torch.empty(2**28), requires_grad=False))  # 1 GB
    before = resident()
    made = hollow(module, torch.float16)
    assert resident() - before < 2**24
    assert made.large.dtype == torch.float16 and made.large.shape == module.large.shape
