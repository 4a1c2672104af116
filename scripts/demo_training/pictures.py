"""The pictures: 48 Noto emoji on 8 named colours with grain, 64 x 64 pixels, rendered anew for every batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

SIZE = 64  # pixels
OBJECT = 58  # pixels of the emoji inside
# Standard deviations (of 255) of coarse noise (9 x 9 cells), fine noise (22 x 22 cells) and pixel noise
GRAIN = (6.0, 2.0, 0.8)
FINAL_GRAIN = (6.0, 3.0, 1.5)  # of the last language model stage: the codes stay, a background token carries more
GRADIENT = 14.0  # strongest linear gradient of the background

# concept -> short name in emoji.json
CONCEPTS = {
    "apple": "apple", "banana": "banana", "grapes": "grapes", "watermelon": "watermelon",
    "strawberry": "strawberry", "cherries": "cherries", "carrot": "carrot", "pizza": "pizza",
    "burger": "hamburger", "donut": "doughnut", "ice cream": "icecream", "mushroom": "mushroom",
    "cat": "cat", "dog": "dog", "frog": "frog", "panda": "panda_face", "pig": "pig", "lion": "lion_face",
    "fox": "fox_face", "koala": "koala", "penguin": "penguin", "fish": "tropical_fish", "turtle": "turtle",
    "butterfly": "butterfly", "ladybug": "ladybug", "sun": "sun_with_face", "moon": "crescent_moon",
    "star": "star", "rainbow": "rainbow", "fire": "fire", "tree": "deciduous_tree", "cactus": "cactus",
    "rose": "rose", "sunflower": "sunflower", "heart": "heart", "house": "house", "car": "car", "bus": "bus",
    "rocket": "rocket", "ball": "soccer", "balloon": "balloon", "gift": "gift", "crown": "crown",
    "grinning face": "grinning", "crying face": "sob", "ghost": "ghost", "alien": "alien", "robot": "robot_face",
}  # fmt: skip
NAMES = list(CONCEPTS)
FLIPPED = {"banana", "fish", "turtle", "car", "rocket", "carrot", "pizza", "moon"}  # also drawn mirrored
COLOURS = {
    "white": (247, 247, 247), "pink": (250, 190, 205), "yellow": (250, 232, 150), "green": (150, 215, 150),
    "blue": (150, 200, 245), "purple": (200, 175, 240), "gray": (165, 168, 174), "orange": (252, 190, 130),
}  # fmt: skip
COLOUR_NAMES = list(COLOURS)
PAIRS = len(NAMES) * len(COLOUR_NAMES)


@dataclass(frozen=True)
class Pictures:
    """Rendered pictures: pixels [B, 3, 64, 64] in [-1, 1], coverage of the object [B, 1, 64, 64] in [0, 1]."""

    pixels: Tensor
    coverage: Tensor

    def object_share(self) -> Tensor:
        """Share of every 4 x 4 patch that the object covers, [B, 256]."""
        return functional.avg_pool2d(self.coverage, 4).flatten(1)


class Renderer:
    """Composes emoji over grainy backgrounds."""

    def __init__(self, package: Path, grain: tuple[float, float, float] = GRAIN) -> None:
        self._grain = grain
        entries = {entry["short_name"]: entry for entry in json.loads((package / "emoji.json").read_text("utf-8"))}
        emoji = []
        for short_name in CONCEPTS.values():
            with Image.open(package / "img" / "google" / "64" / entries[short_name]["image"]) as image:
                emoji.append(np.asarray(image.convert("RGBA").resize((OBJECT, OBJECT), Image.Resampling.LANCZOS)))
        self._emoji = torch.from_numpy(np.stack(emoji)).permute(0, 3, 1, 2).float()  # [48, 4, OBJECT, OBJECT]
        self._colours = torch.tensor(list(COLOURS.values())).float()
        self._flipped = torch.tensor([name in FLIPPED for name in NAMES])

    def draw(self, names: Tensor, colours: Tensor, generator: torch.Generator) -> Pictures:
        """Pictures of the concepts `names` [B] on `colours` [B]; place, flip, gradient and grain are random."""
        count = len(names)
        background = self._colours[colours][:, :, None, None] + self._texture(count, generator)
        margin = SIZE - OBJECT
        place = torch.randint(margin // 2 - 1, margin // 2 + 2, (count, 2), generator=generator)
        place[torch.rand(count, generator=generator) < 0.5] = margin // 2
        mirrored = (torch.rand(count, generator=generator) < 0.5) & self._flipped[names]
        emoji = self._emoji[names]
        emoji[mirrored] = emoji[mirrored].flip(3)
        canvas = torch.zeros(count, 4, SIZE, SIZE)
        for index, (down, right) in enumerate(place.tolist()):
            canvas[index, :, down : down + OBJECT, right : right + OBJECT] = emoji[index]
        coverage = canvas[:, 3:] / 255
        pixels = background * (1 - coverage) + canvas[:, :3] * coverage
        return Pictures(pixels.clamp(0, 255) / 127.5 - 1, coverage)

    def _texture(self, count: int, generator: torch.Generator) -> Tensor:
        """Gradient and grain [B, 1, 64, 64]: correlated over two patches, so that a token depends on its neighbours."""

        def noise(cells: int) -> Tensor:
            coarse = torch.randn(count, 1, cells, cells, generator=generator)
            return functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic", align_corners=True)

        line = torch.linspace(-1, 1, SIZE)
        angle = torch.rand(count, 1, 1, 1, generator=generator) * 2 * torch.pi
        strength = torch.rand(count, 1, 1, 1, generator=generator) * GRADIENT
        gradient = (angle.cos() * line[:, None] + angle.sin() * line[None]) * strength
        coarse, fine, pixel = self._grain
        pixels = torch.randn(count, 1, SIZE, SIZE, generator=generator)
        return gradient + noise(9) * coarse + noise(22) * fine + pixels * pixel


def pair(index: Tensor) -> tuple[Tensor, Tensor]:
    """Pair numbers 0..383 as (concept, colour)."""
    return index % len(NAMES), index // len(NAMES)


def contact_sheet(pixels: Tensor, columns: int, scale: int = 2) -> Image.Image:
    """Pictures [B, 3, 64, 64] in [-1, 1] side by side."""
    values = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    rows, cell = -(-len(values) // columns), SIZE + 2
    sheet = np.full((rows * cell, columns * cell, 3), 255, np.uint8)
    for index, picture in enumerate(values):
        top, left = index // columns * cell, index % columns * cell
        sheet[top : top + SIZE, left : left + SIZE] = picture
    image = Image.fromarray(sheet)
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
