"""The demo domain's scorer: small, safe to load, and higher for a picture's own caption and for whole pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import CLIPModel, CLIPProcessor

from runtime import ImageModel

FOLDER = Path(__file__).parents[2] / "runtime" / "demo_scorer"
PROMPTS = [
    "apple on white",
    "cat on pink",
    "bus on gray",
    "house on blue",
    "sunflower on green",
    "ghost on purple",
    "rocket on yellow",
    "ice cream on orange",
]
PATCH = 8


@pytest.fixture(scope="module")
def pictures(demo: ImageModel) -> np.ndarray:
    """One per prompt, [8, 64, 64, 3]."""
    return demo.generate(PROMPTS, preset="sjd", seed=100, batch=8).pixels


def score(pixels: np.ndarray, captions: list[str]) -> torch.Tensor:
    """Cosines [pictures, captions], by transformers' own path from the folder."""
    model = CLIPModel.from_pretrained(FOLDER, local_files_only=True).eval()
    processor = CLIPProcessor.from_pretrained(FOLDER, local_files_only=True)
    inputs = processor(text=captions, images=list(pixels), return_tensors="pt", padding=True)
    with torch.no_grad():
        shown = model.get_image_features(inputs["pixel_values"]).pooler_output
        said = model.get_text_features(inputs["input_ids"]).pooler_output
    assert shown.shape == (len(pixels), 64)
    return functional.normalize(shown, dim=1) @ functional.normalize(said, dim=1).T


def permute(pixels: np.ndarray) -> np.ndarray:
    """Patches of every picture in a random order."""
    count, side = len(pixels), 64 // PATCH
    pieces = pixels.reshape(count, side, PATCH, side, PATCH, 3).swapaxes(2, 3).reshape(count, -1, PATCH, PATCH, 3)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(side * side), (count, 1)), axis=1)
    mixed = np.take_along_axis(pieces, order[:, :, None, None, None], 1)
    return mixed.reshape(count, side, side, PATCH, PATCH, 3).swapaxes(2, 3).reshape(pixels.shape)


def test_folder_is_small_and_holds_no_pickle() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    assert {path.suffix for path in files} <= {".json", ".md", ".safetensors"}
    assert not [path for path in files if path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"PK")]


@pytest.mark.parametrize("form", ["{name} on {colour}", "{name}", "a {name}"])
def test_own_caption_wins(pictures: np.ndarray, form: str) -> None:
    captions = [form.format(name=name, colour=colour) for name, colour in (text.split(" on ") for text in PROMPTS)]
    assert score(pictures, captions).argmax(1).tolist() == list(range(len(PROMPTS)))


def test_background_colour_counts(pictures: np.ndarray) -> None:
    colours = [text.split(" on ")[1] for text in PROMPTS]
    for index, text in enumerate(PROMPTS):
        name, colour = text.split(" on ")
        scores = score(pictures[index : index + 1], [f"{name} on {other}" for other in colours])[0]
        assert colours[int(scores.argmax())] == colour


def test_permuted_patches_score_lower(pictures: np.ndarray) -> None:
    whole, mixed = (score(pixels, PROMPTS).diagonal() for pixels in (pictures, permute(pictures)))
    assert (mixed < whole - 0.1).all()
