"""The exported body against the stock transformers model: nothing of the exporter is in the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.onnx_runtime import OnnxRuntimeEngine
from runtime.bundle import STEP, open_bundle
from tests.export.step_runner import StepRunner

torch = pytest.importorskip("torch")

CAPACITY = 40
WINDOWS = (2, 7, 1, 5, 3, 8, 1, 4)


@pytest.fixture(scope="module")
def stock(toy_checkpoint: Path) -> Any:
    """The checkpoint in the class that users know."""
    from transformers import JanusForConditionalGeneration

    return JanusForConditionalGeneration.from_pretrained(toy_checkpoint, dtype=torch.float32).eval()


def stock_logits(model: Any, ids: list[int], codes: int) -> np.ndarray:
    """Logits [L, V] of a sequence of bundle ids: image codes first, then the text vocabulary."""
    with torch.no_grad():
        parts = [
            model.prepare_embeddings_for_image_generation(torch.tensor([[identifier]]))
            if identifier < codes
            else model.get_input_embeddings()(torch.tensor([[identifier - codes]]))
            for identifier in ids
        ]
        hidden = model.model.language_model(inputs_embeds=torch.cat(parts, 1), use_cache=False).last_hidden_state
        logits: np.ndarray = model.model.generation_head(hidden)[0].numpy()
    return logits


def worst_difference(stock: Any, folder: Path, rows: int, shift: int = 0) -> float:
    """Random windows; after each, every row goes back by its own number of tokens, also into earlier windows.

    `shift` writes and reads every later window that many slots too far left: a fault that must show.
    """
    manifest = open_bundle(folder, verify=False).manifest
    codes, generator = manifest.image_vocabulary, np.random.default_rng(rows)
    run = StepRunner(OnnxRuntimeEngine(folder / STEP, threads=1), manifest, rows, CAPACITY)
    known: list[list[int]] = [[] for _ in range(rows)]
    worst = 0.0
    for window in WINDOWS:
        ids = generator.integers(0, codes + manifest.text_vocabulary, (rows, window))
        length = np.array([max(0, len(row) - shift) for row in known])
        got = run(ids, length)
        for row in range(rows):
            known[row] += [int(identifier) for identifier in ids[row]]
            expected = stock_logits(stock, known[row], codes)[-window:]
            worst = max(worst, float(np.abs(got[row] - expected).max() / np.abs(expected).max()))
            kept = len(known[row]) - int(generator.integers(0, window + 3))
            known[row] = known[row][: max(1, kept)]
    return worst


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_windows_after_roll_backs_equal_the_full_forward(stock: Any, toy_bundle: Path, rows: int) -> None:
    assert worst_difference(stock, toy_bundle, rows) < 1e-5


def test_a_length_off_by_one_is_noticed(stock: Any, toy_bundle: Path) -> None:
    assert worst_difference(stock, toy_bundle, rows=2, shift=1) > 1e-2


def test_pixels_equal_the_stock_decoder(stock: Any, toy_bundle: Path) -> None:
    manifest = open_bundle(toy_bundle, verify=False).manifest
    codes = np.random.default_rng(5).integers(0, manifest.image_vocabulary, (3, manifest.codes))
    pixels = np.empty((3, manifest.height, manifest.width, 3), np.uint8)
    OnnxRuntimeEngine(toy_bundle / "image_decoder.onnx", threads=1).bind({"codes": codes}, {"pixels": pixels})()
    with torch.no_grad():
        levels = stock.decode_image_tokens(torch.from_numpy(codes)).numpy()  # [B, height, width, 3] in [-1, 1]
    expected = np.clip((levels + 1) / 2, 0, 1) * 255
    assert expected.std() > 5, "a picture of one colour would prove nothing"
    assert np.abs(pixels - expected).max() <= 1
